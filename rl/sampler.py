"""What all trainers share: a model with its tokenizer, opened as the configuration says, and an engine on it.

What a user may have got wrong is checked in the order of its price: names and columns before the tokenizer,
the tokenizer before the weights.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from covey.policies.adapter import read_adapter
from covey.policies.decoder import DecoderPolicy
from covey.policies.hf import HFPolicy
from covey.policies.load import pick_device
from covey.policies.locate import ModelError, locate_model
from covey.policies.open import choose_path, open_policy
from covey.policies.tokenizer import check_vocabulary, eos_ids, load_tokenizer
from covey.rewards.runner import Scorer
from covey.rl.checkpoint import find_adapter, find_model
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.data import Cursor, Row
from covey.rl.distributed import world_size
from covey.rl.engines import make_engine
from covey.rl.grpo import gather_groups, sample_share
from covey.rl.loop import Results
from covey.rl.methods import full_warnings
from covey.rl.metrics import sample_rows
from covey.rl.optimizer import FlatAdamW
from covey.rl.templates import Encoder, check_context, make_prompts
from covey.rollout.engine import Message, Prompt, RolloutEngine, Sampling

Config = GrpoConfig | SftConfig | DpoConfig


class Sampler:
    """A model ready to be trained and sampled from: what both algorithms share."""

    command: str
    optimizer: FlatAdamW
    cursor: Cursor
    steps: int
    held_out: Sequence[Any]  # prompts, documents or pairs
    eval_tokens: int  # of a completion in an evaluation, at most

    def __init__(self, config: Config):
        self.config = config
        model, lora = config.model, config.lora
        if model.method == "full" and model.adapter is not None:
            raise ModelError(
                "model.adapter: full finetuning has none; merge it into the model, or use lora or qlora"
            )
        self.adapter = None if model.adapter is None else find_adapter(Path(model.adapter).expanduser())
        self.folder = locate_model(find_model(model.path))
        self.options = lora.path_options
        self.options["context"] = model.context
        self.route = choose_path(self.folder, method=model.method, adapter=self.adapter, **self.options)
        self.tokenizer = load_tokenizer(self.folder, model.chat_template, model.template_options)
        check_vocabulary(self.tokenizer, self.route.vocab_size)
        self.eos = eos_ids(self.folder, self.tokenizer)
        self.device = torch.device(pick_device(config.model.device))
        if world_size() > 1 and self.device.index is not None:
            raise ModelError(
                f"model.device: {self.device} would be that of every process. Leave the number out: each takes its own"
            )
        self.warnings: list[str] = []
        if model.method == "full":
            self.warnings += full_warnings(config)

    def check_steps(self, steps: int, held_out: Sequence[Any]) -> int:
        """`steps`, with warnings about settings that will have no effect in a run of them."""
        if self.config.eval.every and not held_out:
            share = " or eval.share" if isinstance(self.config, SftConfig) else ""
            self.warnings.append(f"eval.every is set, but there are no held-out rows: set data.eval{share}")
        warmup, lr = self.config.optim.warmup_steps, self.config.optim.lr
        if warmup >= steps:
            self.warnings.append(
                f"optim.warmup_steps is {warmup}: with {steps} steps the lr of {lr:g} is never reached"
            )
        return steps

    def sketch(self) -> str:
        """Of what every process of a run must have alike: how many steps, and the tokens of about a thousand rows."""
        sketch = [str(self.steps)]
        for rows in (getattr(self, "data", []), self.held_out):
            some = [rows[i] for i in range(0, len(rows), 1 + len(rows) // 1000)]
            parts = [row if isinstance(row, tuple) else (row,) for row in some]  # a pair is two documents
            sketch += [str(len(rows)), *(str(list(part.ids)) for row in parts for part in row)]
        return hashlib.sha256(" ".join(sketch).encode()).hexdigest()

    def load(self, max_rows: int, *, reference: bool) -> None:
        """The expensive part: weights. reference: whether anything will ask for the reference policy."""
        model, lora = self.config.model, self.config.lora
        self.policy: DecoderPolicy | HFPolicy = open_policy(
            self.folder,
            method=model.method,
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.rslora,
            dtype=model.dtype,
            device=str(self.device),
            memory=model.memory,
            adapter=self.adapter,
            reference=model.reference if reference else "none",
            tokens_per_pass=self.config.optim.tokens_per_pass,
            seed=self.config.run.seed,
            **self.options,
        )
        self.engine: RolloutEngine = make_engine(
            self.config,
            self.policy,
            self.folder,
            self.tokenizer,
            self.eos,
            max_rows,
            self.route.max_positions,
        )
        self.rollouts = self.engine  # where the run's completions come from

    def prompts(self, rows: Sequence[Row], max_new_tokens: int) -> list[Prompt]:
        """The rows' prompts, checked against the model's positions."""
        prompts = make_prompts(rows, self.tokenizer, self.config.data)
        self._report("prompts", prompts)
        check_context(prompts.longest, max_new_tokens, self.route.max_positions)
        return list(prompts)

    def _report(self, what: str, encoded: Any) -> None:
        self.warnings += encoded.warnings
        for word in ("dropped", "truncated"):
            if count := getattr(encoded, word):
                rows = getattr(encoded, "rows", len(encoded) + encoded.dropped)
                self.warnings.append(f"{count} of {rows} {what} were too long and were {word}")

    def encode(self, text: str | Sequence[Message]) -> Prompt:
        """One prompt, written as the configuration writes those of the data."""
        raw = isinstance(text, str)
        row = Row(0, "prompt", {}, prompt=text if raw else None, messages=None if raw else tuple(text))  # type: ignore[arg-type]
        rendered, messages, ids = Encoder(self.tokenizer, self.config.data).prompt(row)
        return Prompt(0, tuple(ids), rendered, messages)

    def eval_sampling(self, stop: Sequence[str] = ()) -> Sampling:
        """How completions of the evaluations are drawn: alike in all of them."""
        keys = {field.name for field in fields(Sampling)} - {"max_new_tokens"}
        draws = self.config.eval.model_dump(include=keys)
        return Sampling(self.eval_tokens, **draws, stop=tuple(stop), seed=self.config.run.seed)

    def scored(self, prompts: Sequence[Prompt], scorer: Scorer, sampling: Sampling) -> Results:
        """Metrics eval/reward and eval/NAME of one completion per prompt."""
        groups = sample_share(self.rollouts, prompts, 1, sampling)
        groups, scores = gather_groups(prompts, groups, scorer(groups))
        rows = sample_rows(groups, scores.total, scores.per_function, 0 * scores.total)
        known = [row.reward for row in rows if row.reward == row.reward]
        reward = sum(known) / len(known) if known else float("nan")
        cut = sum(row.finish == "length" for row in rows) / len(rows)
        metrics = {f"eval/{name}": value for name, value in scores.means().items()}
        return metrics | {"eval/reward": reward, "eval/truncated": cut, "eval/rows": float(len(rows))}, rows

    def save_adapter(self, folder: Path) -> None:
        self.policy.save_adapter(folder, self.config.model.path)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the adapter. The optimiser's tensors are its own, not copies."""
        state = {"optimizer": self.optimizer.state_dict(), "cursor": self.cursor.state()}
        if isinstance(self.policy, HFPolicy):
            state["policy"] = self.policy.state()
        return state | {"updates": self.optimizer.updates}

    def restore(self, adapter: Path, state: Mapping[str, Any], step: int) -> None:
        """Go on after `step` steps; the reference policy stays what it is."""
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        self.cursor.restore(state["cursor"])
        self.load_adapter(adapter, step)
        if isinstance(self.policy, HFPolicy):
            self.policy.load_state(state["policy"])

    def load_adapter(self, adapter: Path, step: int) -> None:
        """Take the weights that were saved after `step`."""
        if isinstance(self.policy, HFPolicy):
            self.policy.load_saved(adapter)
        else:
            self.policy.load_weights(read_adapter(adapter)[1])
        self.engine.update(self.policy.weights(), step)

    @property
    def device_name(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return name if world_size() == 1 else f"{name}, {world_size()} processes"

    def info(self, **facts: Any) -> dict[str, Any]:
        """The part of RunInfo that both algorithms fill alike."""
        method, policy = self.config.model.method, self.policy
        if isinstance(policy, HFPolicy):
            adapter = f", rank {policy.rank}" if policy.rank else ""
            layout = "packed" if policy.packed else "padded rows"
            details = {"policy": f"transformers, {layout}: {self.route.why}", **facts.pop("details", {})}
            facts["details"] = details
        else:
            adapter = f", rank {policy.adapter.rank}"
        return {
            "command": self.command,
            "model": self.config.model.path,
            "method": f"{method}{adapter}, {str(policy.dtype)[6:]}",
            "device": self.device_name,
            "trainable": sum(p.numel() for p in policy.parameters()),
            "parameters": self.route.num_parameters,
            **facts,
        }
