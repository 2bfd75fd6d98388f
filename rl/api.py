"""The Python interface: `covey.grpo`, `covey.sft`, `covey.dpo`, `covey.load_policy`, and what they return."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Threads of an idle OpenMP pool that spin take time from whatever else the machine does. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console

from covey.policies.decoder import DecoderPolicy
from covey.policies.hf import HFPolicy
from covey.policies.open import open_policy as load_policy
from covey.rewards.reward import RewardSpec
from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.config_file import Source, dump_config, load_config
from covey.rl.display import Display
from covey.rl.distributed import check_same, from_first, gather_objects, is_first, join_ranks, world_size
from covey.rl.export.export import export
from covey.rl.loop import RunLoop
from covey.rl.metrics import Metrics
from covey.rl.run_folder import RunFolder, default_name
from covey.rl.startup import seldom_collected
from covey.rl.stream import sft_trainer
from covey.rl.trainers import DpoTrainer, GrpoTrainer, SftTrainer
from covey.rollout.engine import Message, Sampling

__all__ = ["Run", "dpo", "export", "grpo", "load_policy", "run_dpo", "run_grpo", "run_sft", "sft"]

RewardLike = str | Callable[..., Any] | RewardSpec
Trainer = GrpoTrainer | SftTrainer | DpoTrainer
GIVEN_IN_PYTHON = "rows given in Python"


class Run:
    """A run that has ended: its numbers, its policy, its folder."""

    def __init__(self, trainer: Trainer, loop: RunLoop):
        self._trainer = trainer
        self.config = trainer.config
        self.folder: Path = loop.folder.path
        self.adapter: Path = loop.adapter
        self.metrics: Metrics = loop.metrics
        self.interrupted: bool = loop.interrupted

    @property
    def policy(self) -> DecoderPolicy | HFPolicy:
        """The trained policy, ready for more training or sampling."""
        return self._trainer.policy

    def generate(
        self,
        text: str | Sequence[Message],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """What the trained model answers to a prompt, which is written as those of the data were."""
        prompt = self._trainer.encode(text)
        sampling = Sampling(max_new_tokens, temperature, stop=tuple(stop), seed=seed)
        return self._trainer.engine.generate([prompt], 1, sampling)[0].completions[0].text

    def __repr__(self) -> str:
        return f"Run({self.folder}, {self._trainer.steps} steps{', interrupted' if self.interrupted else ''})"


def grpo(
    config: Source = None,
    *,
    rewards: Sequence[RewardLike] = (),
    data: Any = None,
    eval_data: Any = None,
    resume: str | None = None,
    plain: bool | None = None,
    **overrides: Any,
) -> Run:
    """Train with GRPO.

    config: a recipe file, a recipe's name ("quickstart"), a nested dict, or None for the defaults.
    rewards: functions (docs/rewards.md), built-in names or RewardSpecs, instead of those of the configuration.
    data, eval_data: rows as a list of dicts, a `datasets.Dataset`, or a table of pandas, polars or
    pyarrow, instead of data.train and data.eval.
    resume: "auto", a run's folder or a checkpoint's. plain: one line per step instead of a live display.
    overrides: sections as dicts, for example optim={"lr": 1e-5}.
    Raises ValueError for what the caller can mend, RunError (a RuntimeError) for what went wrong on the way.
    """
    loaded = _load(config, overrides, data, GrpoConfig)
    return _launch(GrpoTrainer, loaded, rewards, data, eval_data, resume, plain)


def sft(
    config: Source = None,
    *,
    rewards: Sequence[RewardLike] = (),
    data: Any = None,
    eval_data: Any = None,
    resume: str | None = None,
    plain: bool | None = None,
    **overrides: Any,
) -> Run:
    """Fine-tune on worked answers. As `grpo`; rewards only score greedy completions in the evaluations."""
    loaded = _load(config, overrides, data, SftConfig)
    return _launch(sft_trainer(loaded), loaded, rewards, data, eval_data, resume, plain)


def dpo(
    config: Source = None,
    *,
    rewards: Sequence[RewardLike] = (),
    data: Any = None,
    eval_data: Any = None,
    resume: str | None = None,
    plain: bool | None = None,
    **overrides: Any,
) -> Run:
    """Learn from preferences: rows with a prompt, a chosen and a rejected completion. As `sft`."""
    loaded = _load(config, overrides, data, DpoConfig)
    return _launch(DpoTrainer, loaded, rewards, data, eval_data, resume, plain)


def run_grpo(config: GrpoConfig, *, resume: str | None = None) -> Run:
    """GRPO from a validated configuration: the command."""
    return _launch(GrpoTrainer, config, resume=resume)


def run_sft(config: SftConfig, *, resume: str | None = None) -> Run:
    """SFT from a validated configuration: the command."""
    return _launch(sft_trainer(config), config, resume=resume)


def run_dpo(config: DpoConfig, *, resume: str | None = None) -> Run:
    """DPO from a validated configuration: the command."""
    return _launch(DpoTrainer, config, resume=resume)


def _launch(
    kind: type[GrpoTrainer] | type[SftTrainer] | type[DpoTrainer],
    config: Any,
    rewards: Sequence[RewardLike] = (),
    data: Any = None,
    eval_data: Any = None,
    resume: str | None = None,
    plain: bool | None = None,
) -> Run:
    """Check everything that is cheap to check, make the run's folder, load the weights, run. `rewards` replace
    those of the configuration."""
    join_ranks()
    _prepare(config)
    given = [_spec(reward) for reward in rewards]
    named = [RewardSpec(**dict(r)) for r in config.rewards]
    with seldom_collected():
        trainer = kind(config, given or named, data, eval_data)
    if world_size() > 1:
        check_same(trainer.sketch(), "rows")
    text = dump_config(config) + "".join(f"# reward given in Python: {_describe(s)}\n" for s in given)
    folder = from_first(
        lambda: RunFolder.create(
            config.run,
            default_name(trainer.command, config.model.path),
            text,
            resume=resume,
            device=trainer.device_name,
            cuda=torch.version.cuda,
        )
    )
    with Display(plain=plain, console=None if is_first() else Console(quiet=True)) as display:
        with seldom_collected():
            trainer.load_weights()
        loop = RunLoop(trainer, folder, config.eval, config.run, display)
        where = {"name": folder.name, "folder": str(folder.path), "first_step": loop.done}
        display.start(trainer.describe(**where, history=list(loop.metrics)))
        for warning in trainer.warnings:
            display.hint(warning)
        loop()
    gather_objects(None)  # the first rank has saved what the others may read next
    return Run(trainer, loop)


def _prepare(config: GrpoConfig | SftConfig | DpoConfig) -> None:
    logging.getLogger("covey").setLevel(logging.INFO if is_first() else logging.ERROR)
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world_size() > 1 else 1  # processes on this machine
    torch.set_num_threads(config.run.threads or max(1, len(available) // here))


def _load(config: Source, overrides: Mapping[str, Any], data: Any, model: type[Any]) -> Any:
    """Rows given in Python need no data.train."""
    given = {} if data is None else {"data.train": GIVEN_IN_PYTHON}
    return load_config(config, {**given, **overrides}, model)


def _spec(reward: RewardLike) -> RewardSpec:
    return reward if isinstance(reward, RewardSpec) else RewardSpec(reward)


def _describe(spec: RewardSpec) -> str:
    use = (
        spec.use
        if isinstance(spec.use, str)
        else f"{spec.use.__module__}:{getattr(spec.use, '__qualname__', spec.use)}"
    )
    return f"{use}, weight {spec.weight:g}"
