"""What to say about an unknown key: the key that was meant, its section, or the command it belongs to."""

import difflib
from typing import Any, get_args

from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.config_types import Section
from covey.rl.config_yaml import KeyPath, dotted

COMMANDS = {GrpoConfig: "covey grpo", SftConfig: "covey sft", DpoConfig: "covey dpo"}

# What other trainers call it -> our keys; those that the command does not have are left out of a hint.
ALIASES = {
    "activation_offloading": "model.memory",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "adv_estimator": "objective.advantage",
    "advantage_estimator": "objective.advantage",
    "assistant_only_loss": "data.loss_on",
    "batch_size": "rollout.prompts_per_step optim.rows_per_step",
    "bf16": "model.dtype",
    "chat_template_kwargs": "model.template_options",
    "chat_template_path": "model.chat_template",
    "clip": "objective.clip_low objective.clip_high",
    "clip_range": "objective.clip_low objective.clip_high",
    "clip_ratio": "objective.clip_low objective.clip_high",
    "clip_ratio_c": "objective.ratio_cap",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "completion_only_loss": "data.loss_on",
    "custom_reward_function": "rewards",
    "data_seed": "data.seed",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_text_field": "data.text",
    "default_local_dir": "run.dir",
    "delta": "objective.ratio_cap",
    "dynamic_filtering": "rollout.dynamic_sampling",
    "early_stopping_patience": "eval.patience",
    "early_stopping_threshold": "eval.min_delta",
    "entropy_coef": "objective.entropy_bonus",
    "entropy_coef_delta": "objective.entropy_step",
    "entropy_coeff": "objective.entropy_bonus",
    "env": "environment.use",
    "env_args": "environment.args",
    "env_id": "environment.use",
    "environment_factory": "environment.use",
    "eps_clip": "objective.clip_low objective.clip_high",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "eval_dataset": "data.eval",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "experiment_name": "run.name",
    "fast_inference": "rollout.engine",
    "filter_groups": "rollout.dynamic_sampling",
    "filter_overlong_prompts": "data.overlong",
    "fp16": "model.dtype",
    "full_finetuning": "model.method",
    "generate_max_len": "rollout.max_new_tokens",
    "generation_batch_size": "rollout.prompts_per_step",
    "gpu_memory_utilization": "rollout.vllm.memory",
    "grad_clip": "optim.max_grad_norm",
    "gradient_accumulation_steps": "optim.tokens_per_pass",
    "gradient_checkpointing": "model.memory",
    "importance_sampling_level": "objective.loss",
    "init_kl_coef": "objective.beta",
    "interaction_config_path": "environment.use",
    "kl_coef": "objective.beta",
    "kl_estimator": "objective.kl",
    "kl_loss_coef": "objective.beta",
    "kl_loss_type": "objective.kl",
    "learning_rate": "optim.lr",
    "load_in_4bit": "model.method",
    "load_in_fp8": "rollout.vllm.base",
    "log_completions": "run.samples_every",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "loss_agg_mode": "objective.aggregation",
    "loss_type": "objective.loss objective.aggregation",
    "lr_scheduler_type": "optim.schedule",
    "mask_truncated_completions": "objective.truncated",
    "max_assistant_turns": "environment.max_turns",
    "max_completion_length": "rollout.max_new_tokens",
    "max_length": "data.max_tokens rollout.max_new_tokens",
    "max_lora_rank": "lora.rank",
    "max_num_gen_batches": "rollout.dynamic_sampling",
    "max_num_seqs": "rollout.max_rows",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_seq_length": "data.max_tokens rollout.max_new_tokens",
    "max_steps": "optim.steps",
    "max_tokens": "rollout.max_new_tokens",
    "max_tool_calling_iterations": "environment.max_turns",
    "micro_batch_size": "optim.tokens_per_pass",
    "min_lr_rate": "optim.min_lr_ratio",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "mu": "objective.epochs",
    "multi_objective_aggregation": "objective.advantage",
    "multi_turn": "environment.use environment.tools",
    "n": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "norm_adv_by_std_in_grpo": "objective.advantage",
    "num_completions_to_print": "run.samples_every",
    "num_epochs": "optim.epochs",
    "num_generations": "rollout.group_size",
    "num_iterations": "objective.epochs",
    "num_steps": "optim.steps",
    "num_train_epochs": "optim.epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "rollout.prompts_per_step optim.rows_per_step",
    "policy_loss": "objective.loss",
    "ppo_epochs": "objective.epochs",
    "ppo_max_token_len_per_gpu": "optim.tokens_per_pass",
    "ppo_micro_batch_size_per_gpu": "optim.tokens_per_pass",
    "ppo_mini_batch_size": "objective.updates_per_rollout",
    "pretrain": "model.path",
    "prompt_key": "data.prompt",
    "prompt_length": "data.max_prompt_tokens",
    "quant": "model.method",
    "quantization": "model.method",
    "r": "lora.rank",
    "random_state": "run.seed",
    "response_length": "rollout.max_new_tokens",
    "reward": "rewards",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "reward_weights": "rewards",
    "rollout_batch_size": "rollout.prompts_per_step",
    "rollout_func": "environment.use",
    "rollout_is": "objective.correction",
    "rollout_is_threshold": "objective.correction_high",
    "rpo_alpha": "objective.sft_weight",
    "run_name": "run.name",
    "sapo_temperature_neg": "objective.tau_negative",
    "sapo_temperature_pos": "objective.tau_positive",
    "save_freq": "run.save_every",
    "save_steps": "run.save_every",
    "save_strategy": "run.save_every",
    "save_total_limit": "run.keep",
    "scale_rewards": "objective.advantage",
    "scheduler": "optim.schedule",
    "shuffle_dataset": "data.shuffle",
    "steps_per_generation": "objective.updates_per_rollout",
    "system_prompt": "data.system",
    "target_modules": "lora.targets",
    "test_freq": "eval.every",
    "tool_config_path": "environment.tools",
    "top_entropy_quantile": "objective.top_entropy",
    "torch_dtype": "model.dtype",
    "total_epochs": "optim.epochs",
    "total_training_steps": "optim.steps",
    "train_batch_size": "rollout.prompts_per_step optim.rows_per_step",
    "train_dataset": "data.train",
    "train_files": "data.train",
    "truncation_mode": "data.overlong",
    "use_adaptive_entropy": "objective.entropy_target",
    "use_bias_correction_kl": "objective.kl_ratio",
    "use_cpu": "model.device",
    "use_dora": "lora.dora",
    "use_gradient_checkpointing": "model.memory",
    "use_kl_in_reward": "objective.kl_in",
    "use_kl_loss": "objective.kl_in",
    "use_rslora": "lora.rslora",
    "use_vllm": "rollout.engine",
    "val_files": "data.eval",
    "vespo_k_neg": "objective.gamma_negative",
    "vespo_k_pos": "objective.gamma_positive",
    "vespo_lambda_neg": "objective.gamma_negative",
    "vespo_lambda_pos": "objective.gamma_positive",
    "vllm_gpu_memory_utilization": "rollout.vllm.memory",
    "vllm_importance_sampling_cap": "objective.correction_high",
    "vllm_importance_sampling_clip_max": "objective.correction_high",
    "vllm_importance_sampling_clip_min": "objective.correction_low",
    "vllm_importance_sampling_correction": "objective.correction",
    "vllm_importance_sampling_mode": "objective.correction objective.correction_level",
    "vllm_mode": "rollout.engine",
    "vllm_server_base_url": "rollout.vllm.urls",
    "vllm_server_host": "rollout.vllm.urls",
    "vllm_server_port": "rollout.vllm.urls",
    "vllm_server_timeout": "rollout.vllm.timeout",
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
    theirs = ALIASES.get(name, "").split()
    return same or [key for key in theirs if ".".join(key.split(".")[:2]) in known]


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
