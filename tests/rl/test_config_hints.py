"""The names of other trainers: each leads to the key that does the same here."""

import pytest

from covey.rl.config import DpoConfig, GrpoConfig, SftConfig
from covey.rl.config_hints import ALIASES, suggest

# Fields of TRL 1.15 (GRPOConfig, SFTConfig, DPOConfig and the TrainingArguments behind them), and keys of Unsloth,
# verl, OpenRLHF and prime-rl, that do there what the key beside them does here.
GRPO = """
    num_generations rollout.group_size            per_device_train_batch_size rollout.prompts_per_step
    max_completion_length rollout.max_new_tokens  steps_per_generation objective.updates_per_rollout
    generation_batch_size rollout.prompts_per_step shuffle_dataset data.shuffle
    chat_template_kwargs model.template_options   temperature rollout.temperature|eval.temperature
    use_vllm rollout.engine                       vllm_mode rollout.engine
    vllm_server_base_url rollout.vllm.urls        vllm_server_host rollout.vllm.urls
    vllm_server_port rollout.vllm.urls            vllm_server_timeout rollout.vllm.timeout
    vllm_gpu_memory_utilization rollout.vllm.memory
    beta objective.beta                           num_iterations objective.epochs
    epsilon objective.clip_low                    epsilon_high objective.clip_high
    delta objective.ratio_cap                     loss_type objective.loss|objective.aggregation
    sapo_temperature_neg objective.tau_negative   sapo_temperature_pos objective.tau_positive
    vespo_k_pos objective.gamma_positive          vespo_lambda_pos objective.gamma_positive
    vespo_k_neg objective.gamma_negative          vespo_lambda_neg objective.gamma_negative
    importance_sampling_level objective.loss      reward_weights rewards
    multi_objective_aggregation objective.advantage  scale_rewards objective.advantage
    mask_truncated_completions objective.truncated   top_entropy_quantile objective.top_entropy
    entropy_coef objective.entropy_bonus          use_adaptive_entropy objective.entropy_target
    entropy_target objective.entropy_target       entropy_coef_delta objective.entropy_step
    max_tool_calling_iterations environment.max_turns
    vllm_importance_sampling_correction objective.correction
    vllm_importance_sampling_mode objective.correction|objective.correction_level
    vllm_importance_sampling_clip_max objective.correction_high
    vllm_importance_sampling_clip_min objective.correction_low
    vllm_importance_sampling_cap objective.correction_high
    use_bias_correction_kl objective.kl_ratio     log_completions run.samples_every
    num_completions_to_print run.samples_every    reward_funcs rewards

    output_dir run.dir            run_name run.name             seed data.seed|run.seed
    data_seed data.seed           learning_rate optim.lr        lr_scheduler_type optim.schedule
    warmup_steps optim.warmup_steps  weight_decay optim.weight_decay  adam_beta1 optim.beta1
    adam_beta2 optim.beta2        adam_epsilon optim.eps        max_grad_norm optim.max_grad_norm
    max_steps optim.steps         bf16 model.dtype              fp16 model.dtype
    eval_strategy eval.every      eval_steps eval.every         save_strategy run.save_every
    save_steps run.save_every     save_total_limit run.keep     use_cpu model.device
    gradient_accumulation_steps optim.tokens_per_pass           gradient_checkpointing model.memory

    max_turns environment.max_turns     tools environment.tools       env environment.use
    environment_factory environment.use rollout_func environment.use  env_id environment.use
    env_args environment.args           multi_turn environment.use|environment.tools
    max_assistant_turns environment.max_turns  tool_config_path environment.tools

    fast_inference rollout.engine       load_in_4bit model.method     full_finetuning model.method
    gpu_memory_utilization rollout.vllm.memory  random_state run.seed use_rslora lora.rslora
    lora_dropout lora.dropout           lora_alpha lora.alpha         target_modules lora.targets
    use_gradient_checkpointing model.memory

    n rollout.group_size                n_samples_per_prompt rollout.group_size
    train_files data.train              val_files data.eval           max_response_length rollout.max_new_tokens
    adv_estimator objective.advantage   clip_ratio_low objective.clip_low  clip_ratio_high objective.clip_high
    clip_ratio_c objective.ratio_cap    loss_agg_mode objective.aggregation  kl_loss_coef objective.beta
    kl_loss_type objective.kl           use_kl_loss objective.kl_in   use_kl_in_reward objective.kl_in
    ppo_mini_batch_size objective.updates_per_rollout  ppo_max_token_len_per_gpu optim.tokens_per_pass
    filter_groups rollout.dynamic_sampling  rollout_is objective.correction  test_freq eval.every
    save_freq run.save_every            total_training_steps optim.steps  experiment_name run.name
    filter_overlong_prompts data.overlong  custom_reward_function rewards  lora_rank lora.rank
    init_kl_coef objective.beta         kl_estimator objective.kl     eps_clip objective.clip_low|objective.clip_high
"""
SFT = """
    max_length data.max_tokens          dataset_text_field data.text        completion_only_loss data.loss_on
    assistant_only_loss data.loss_on    truncation_mode data.overlong   chat_template_path model.chat_template
    num_train_epochs optim.epochs       per_device_train_batch_size optim.rows_per_step
    early_stopping_patience eval.patience  early_stopping_threshold eval.min_delta
    activation_offloading model.memory  train_dataset data.train        min_lr_rate optim.min_lr_ratio
"""
DPO = """
    beta objective.beta                 loss_type objective.loss        label_smoothing objective.label_smoothing
    rpo_alpha objective.sft_weight      max_length data.max_tokens      truncation_mode data.overlong
"""


def table(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


CASES = [
    *((GrpoConfig, *row) for row in table(GRPO)),
    *((SftConfig, *row) for row in table(SFT)),
    *((DpoConfig, *row) for row in table(DPO)),
]


@pytest.mark.parametrize(("model", "theirs", "ours"), CASES)
def test_the_name_of_another_trainer_leads_to_ours(model: type, theirs: str, ours: str) -> None:
    assert suggest((theirs,), model) == f"unknown key. Did you mean {ours.replace('|', ' or ')}?"


def test_no_name_is_translated_that_is_a_key_already() -> None:
    """Such a line would never be read: keys are looked for first."""
    names = {key for model in (GrpoConfig, SftConfig, DpoConfig) for key in _all_names(model)}
    # max_tokens is a key of SFT and DPO, and another one in GRPO.
    assert names & ALIASES.keys() == {"max_tokens"}


def _all_names(model: type) -> set[str]:
    return {
        name
        for info in model.model_fields.values()  # type: ignore[attr-defined]
        for name in getattr(info.annotation, "model_fields", {})
    }


def test_what_another_command_has_is_said() -> None:
    assert suggest(("num_generations",), SftConfig) == (
        "unknown key; rollout.group_size belongs to covey grpo, covey sft has none"
    )
    assert suggest(("rpo_alpha",), GrpoConfig) == (
        "unknown key; objective.sft_weight belongs to covey dpo, covey grpo has none"
    )
