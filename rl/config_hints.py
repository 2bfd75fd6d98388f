"""What to say about an unknown key: the key that was meant, its section, or the command it belongs to."""

import difflib
from typing import Any, get_args

from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.config_types import Section
from covey.rl.config_yaml import KeyPath, dotted

COMMANDS = {GrpoConfig: "covey grpo", SftConfig: "covey sft", DpoConfig: "covey dpo"}

# What other trainers call it -> our keys; those that the command does not have are left out of a hint.
ALIASES = {
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "assistant_only_loss": "data.loss_on",
    "batch_size": "rollout.prompts_per_step optim.rows_per_step",
    "bf16": "model.dtype",
    "clip": "objective.clip_low objective.clip_high",
    "clip_range": "objective.clip_low objective.clip_high",
    "clip_ratio": "objective.clip_low objective.clip_high",
    "clip_ratio_c": "objective.ratio_cap",
    "completion_only_loss": "data.loss_on",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_text_field": "data.completion",
    "delta": "objective.ratio_cap",
    "entropy_coeff": "objective.entropy_bonus",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "eval_dataset": "data.eval",
    "eval_steps": "eval.every",
    "fp16": "model.dtype",
    "grad_clip": "optim.max_grad_norm",
    "gradient_accumulation_steps": "optim.tokens_per_pass",
    "gradient_checkpointing": "model.memory",
    "kl": "objective.beta",
    "kl_coef": "objective.beta",
    "learning_rate": "optim.lr",
    "load_in_4bit": "model.method",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "loss_agg_mode": "objective.aggregation",
    "loss_type": "objective.loss objective.aggregation",
    "lr_scheduler_type": "optim.schedule",
    "mask_truncated_completions": "objective.truncated",
    "max_completion_length": "rollout.max_new_tokens",
    "max_length": "data.max_tokens rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_seq_length": "data.max_tokens rollout.max_new_tokens",
    "max_steps": "optim.steps",
    "micro_batch_size": "optim.tokens_per_pass",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "mu": "objective.epochs",
    "num_epochs": "optim.epochs",
    "num_generations": "rollout.group_size",
    "num_iterations": "objective.epochs",
    "num_steps": "optim.steps",
    "num_train_epochs": "optim.epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "rollout.prompts_per_step optim.rows_per_step",
    "ppo_epochs": "objective.epochs",
    "quant": "model.method",
    "quantization": "model.method",
    "r": "lora.rank",
    "reward": "rewards",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "reward_weights": "rewards",
    "run_name": "run.name",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep",
    "scale_rewards": "objective.advantage",
    "scheduler": "optim.schedule",
    "system_prompt": "data.system",
    "target_modules": "lora.targets",
    "top_entropy_quantile": "objective.top_entropy",
    "torch_dtype": "model.dtype",
    "train_batch_size": "rollout.prompts_per_step optim.rows_per_step",
    "use_vllm": "rollout.engine",
    "warmup_ratio": "optim.warmup_steps",
}


# Keys that others have for training and covey refuses, with the reason.
TRUNCATION = (
    "sampling in training is never truncated: a truncated sampler's log-probs are those among the tokens it kept, the "
    "trainer's those among all, and every ratio between them would be wrong. Use rollout.temperature"
)
PENALTY = (
    "sampling in training has no penalties and no bias: the sampler's log-probs would be those of other logits than "
    "the trainer's, and every ratio between them would be wrong. Use a reward that falls with what you do not want"
)
REFUSED = {
    key: f"{reason}; evaluations take eval.{key}"
    for reason, keys in (
        (TRUNCATION, ("top_p", "top_k", "min_p")),
        (PENALTY, ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")),
    )
    for key in keys
}


def suggest(path: KeyPath, model: type[Any]) -> str:
    """The message for the unknown key at `path` of a configuration of type `model`."""
    key = str(path[-1])
    if key in REFUSED and model is GrpoConfig:
        return REFUSED[key]
    known, here = _keys(model), _section_keys(model, path[:-1])
    if key in known and "." in key:
        section, inner = key.split(".")
        return f"dots do not open a section in a file; write {section}: {{{inner}: …}}"
    name = key.rsplit(".", 1)[-1].lower().replace("-", "_")
    meant = _meant(name, known)
    if meant:
        return f"unknown key. Did you mean {' or '.join(meant)}?"
    for other, command in COMMANDS.items():
        theirs = _keys(other, sections=True)
        meant = _meant(name, theirs)
        if other is not model and dotted(path) in theirs:
            return f"belongs to {command}; {COMMANDS[model]} has no such key"
        if other is not model and meant:
            return f"unknown key; {' or '.join(meant)} belongs to {command}, {COMMANDS[model]} has none"
    close = difflib.get_close_matches(name, here, n=1)
    if close:
        return f"unknown key. Did you mean {dotted((*path[:-1], close[0]))}?"
    names = [*(known_key.rsplit(".")[-1] for known_key in known), *ALIASES]
    for match in difflib.get_close_matches(name, names, cutoff=0.75):
        if meant := _meant(match, known):
            return f"unknown key. Did you mean {' or '.join(meant)}?"
    return f"unknown key. {f'Keys of {dotted(path[:-1])}' if path[:-1] else 'Sections'}: {', '.join(here)}"


def _meant(name: str, known: list[str]) -> list[str]:
    """Keys of any section with this name, else those that other trainers call so."""
    same = [key for key in known if key == name or key.endswith(f".{name}")]
    return same or [key for key in ALIASES.get(name, "").split() if key in known]


def _keys(model: type[Any], *, sections: bool = False) -> list[str]:
    """All keys of the sections ("optim.lr"), `rewards` as one; with the sections themselves if asked for."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += [f"{name}.{key}" for key in kind.model_fields] + ([name] if sections else [])
        else:
            keys.append(name)
    return keys


def _section_keys(model: type[Any], path: KeyPath) -> list[str]:
    for part in path:
        kind = model.model_fields[part].annotation if isinstance(part, str) else model
        model = get_args(kind)[0] if get_args(kind) else kind  # an item of a list of sections
    return list(model.model_fields)
