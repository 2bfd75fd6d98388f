"""The peers: each loads the folder in its own way and offers its loss on the common inputs.

A loss is a function without arguments: `sft` and `grpo` return one to call and to differentiate, `logp` one for the
mean negative log-prob of the completions, to call without gradient.

Axes: R rows of T tokens; G completions of N tokens behind a prompt of P.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from benchmarks.peers.inputs import Rollouts, adapter_value
from torch import Tensor

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 16, 32
CLIP = 0.2
Loss = Callable[[], Tensor]


def load(peer: str, folder: Path, method: str, memory: str, longest: int) -> "HuggingFace | Covey":
    """The peer on a model folder. memory is covey's; longest: tokens of a row, for those who plan with it."""
    if peer == "covey":
        return Covey(folder, method, memory)
    kinds = {"hf": HuggingFace, "liger": Liger, "trl": Trl, "trl-flex": TrlFlex, "unsloth": Unsloth}
    return kinds[peer](folder, method, longest)


class HuggingFace:
    """transformers, PEFT and bitsandbytes: adapter in float32, bfloat16 autocast on a GPU, the model's own loss."""

    forward_options: ClassVar[dict[str, Any]] = {"use_cache": False}
    attention = "sdpa"

    def __init__(self, folder: Path, method: str, longest: int):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.folder, self.quantise, self.longest = folder, method == "qlora", longest
        self.model: Any = self.loaded()
        self.model.train()

    def loaded(self) -> Any:
        import peft
        import transformers

        nf4 = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.dtype,
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder,
            quantization_config=nf4 if self.quantise else None,
            dtype=self.dtype,
            attn_implementation=self.attention,
            device_map={"": 0 if self.device.type == "cuda" else "cpu"},
        )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            target_modules=LINEARS,
        )
        return peft.get_peft_model(model, config)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def sft(self, ids_RT: Tensor) -> Loss:
        ids_RT = ids_RT.to(self.device)

        def loss() -> Tensor:
            with self.autocast():
                return self.model(input_ids=ids_RT, labels=ids_RT, **self.forward_options).loss

        return loss

    def grpo(self, rollouts: Rollouts) -> Loss:
        rollouts = rollouts.to(self.device)
        advantage_G1 = rollouts.advantages[:, None]

        def loss() -> Tensor:
            logp_GN = self.logprobs(rollouts)
            ratio_GN = torch.exp(logp_GN - logp_GN.detach())
            clipped_GN = ratio_GN.clamp(1 - CLIP, 1 + CLIP)
            return -torch.minimum(ratio_GN * advantage_G1, clipped_GN * advantage_G1).mean()

        return loss

    def logp(self, rollouts: Rollouts) -> Loss:
        rollouts = rollouts.to(self.device)
        return lambda: -self.logprobs(rollouts).mean()

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        """Log-probs of the completions [G, N]; in float32 a row at a time, not all logits at once."""
        new = rollouts.completions.shape[1]
        with self.autocast():
            out = self.model(input_ids=rollouts.ids, logits_to_keep=new + 1, **self.forward_options)
        rows = zip(out.logits[:, :-1], rollouts.completions, strict=True)
        return torch.stack(
            [torch.log_softmax(row_NV.float(), -1).gather(-1, ids_N[:, None])[:, 0] for row_NV, ids_N in rows]
        )

    def optimizer(self) -> Callable[[], Any]:
        """Its step."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.device.type == "cpu":
            return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0).step
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-4, weight_decay=0.0).step

    @torch.no_grad()
    def fill_adapter(self) -> None:
        for name, p in self.model.named_parameters():
            if "lora_" in name:
                p.copy_(adapter_value(name, p.shape))

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Liger(HuggingFace):
    """hf with liger-kernel's norms, RoPE and MLP, and its losses that never hold all logits."""

    def loaded(self) -> Any:
        import liger_kernel.transformers as liger  # type: ignore
        import transformers

        family = transformers.AutoConfig.from_pretrained(self.folder).model_type
        getattr(liger, f"apply_liger_kernel_to_{family}")(
            fused_linear_cross_entropy=True, cross_entropy=False
        )
        return super().loaded()

    def grpo(self, rollouts: Rollouts) -> Loss:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore

        rollouts = rollouts.to(self.device)
        new = rollouts.completions.shape[1]
        mask_GN = torch.ones_like(rollouts.completions)
        fused = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, loss_type="grpo", epsilon_low=CLIP, epsilon_high=CLIP
        )
        whole = self.model.get_base_model()

        def loss() -> Tensor:
            with self.autocast():
                hidden = whole.model(input_ids=rollouts.ids, **self.forward_options).last_hidden_state
                return fused(
                    hidden[:, -new - 1 : -1],
                    whole.lm_head.weight,
                    rollouts.completions,
                    attention_mask=mask_GN,
                    advantages=rollouts.advantages,
                )[0]

        return loss


class Trl(HuggingFace):
    """TRL's GRPOTrainer on the model of hf. The trainer turns a quantised model's adapter to bfloat16."""

    def tokenizer(self) -> Any:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self.folder, padding_side="left")

    @cache  # noqa: B019  # there is one model in a process
    def trainer(self, group: int, new: int) -> Any:
        """A trainer that is never run: its loss is a method."""
        import datasets
        from trl import GRPOConfig, GRPOTrainer  # type: ignore

        gpu = self.device.type == "cuda"
        config = GRPOConfig(
            output_dir=str(self.folder.parent / "trainer"),
            per_device_train_batch_size=group,
            num_generations=group,
            gradient_accumulation_steps=1,
            max_completion_length=new,
            beta=0.0,
            epsilon=CLIP,
            loss_type="grpo",
            temperature=1.0,
            gradient_checkpointing=True,
            bf16=gpu,
            use_cpu=not gpu,
            use_vllm=False,
            report_to=[],
        )
        trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * group),
            processing_class=self.tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1  # which its training loop sets
        trainer.model.train()
        return trainer

    def grpo(self, rollouts: Rollouts) -> Loss:
        rollouts = rollouts.to(self.device)
        trainer = self.trainer(*rollouts.completions.shape)
        prompts_GP = rollouts.prompt.expand(len(rollouts.completions), -1).contiguous()
        inputs = {
            "prompt_ids": prompts_GP,
            "prompt_mask": torch.ones_like(prompts_GP),
            "completion_ids": rollouts.completions,
            "completion_mask": torch.ones_like(rollouts.completions),
            "advantages": rollouts.advantages,
            "num_items_in_batch": torch.tensor(rollouts.completions.numel(), device=self.device),
        }
        return lambda: trainer.compute_loss(trainer.model, dict(inputs))

    def logp(self, rollouts: Rollouts) -> Loss:
        rollouts = rollouts.to(self.device)
        group, new = rollouts.completions.shape
        trainer = self.trainer(group, new)
        ids, mask = rollouts.ids, torch.ones_like(rollouts.ids)

        def loss() -> Tensor:
            logp_GN = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, new, batch_size=group
            )[0]
            return -logp_GN[:, -new:].float().mean()

        return loss


class TrlFlex(Trl):
    """The same with transformers' flex attention."""

    attention = "flex_attention"


class Unsloth(Trl):
    """Unsloth's model with its checkpointing, and the GRPOTrainer that it puts in the place of TRL's."""

    forward_options: ClassVar[dict[str, Any]] = {}

    def loaded(self) -> Any:
        from unsloth import FastLanguageModel  # type: ignore

        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")  # read by its losses
        model, self._tokenizer = FastLanguageModel.from_pretrained(
            model_name=str(self.folder),
            max_seq_length=self.longest,
            dtype=self.dtype,
            load_in_4bit=self.quantise,
            use_exact_model_name=True,
            local_files_only=True,
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=0,
            bias="none",
            target_modules=LINEARS,
            use_gradient_checkpointing="unsloth",
        )
        FastLanguageModel.for_training(model)
        return model

    def tokenizer(self) -> Any:
        return self._tokenizer


class Covey:
    """covey's own policy, which computes the prompt of a group once."""

    def __init__(self, folder: Path, method: Any, memory: Any):
        from covey.policies.load import load_policy

        self.policy = load_policy(folder, method=method, memory=memory, rank=RANK, alpha=ALPHA)
        self.device = self.policy.device

    def sft(self, ids_RT: Tensor) -> Loss:
        from benchmarks.step import Row

        from covey.rl.batch import pack_documents, to_device
        from covey.rl.objectives import sft_loss

        trained = (False, *[True] * (ids_RT.shape[1] - 1))
        rows = [Row(i, tuple(row), trained) for i, row in enumerate(ids_RT.tolist())]
        batch = to_device(pack_documents(rows), self.device)
        return lambda: sft_loss(self.policy.logprobs(batch).logp, batch)[0]

    def grpo(self, rollouts: Rollouts) -> Loss:
        from covey.rl.config import ObjectiveSection
        from covey.rl.objectives import policy_objective

        batch = self.batch(rollouts)
        section = ObjectiveSection(clip_low=CLIP, clip_high=CLIP, correction="none")
        return lambda: policy_objective(self.policy.logprobs(batch).logp, batch, section)[0]

    def logp(self, rollouts: Rollouts) -> Loss:
        batch = self.batch(rollouts)
        return lambda: -self.policy.logprobs(batch).logp.mean()

    def batch(self, rollouts: Rollouts) -> Any:
        from covey.rl.batch import pack, to_device
        from covey.rollout.engine import Completion, Group, Prompt

        group, new = rollouts.completions.shape
        completions = tuple(
            Completion(tuple(ids), (0.0,) * new, (True,) * new, "", "length")
            for ids in rollouts.completions.tolist()
        )
        packed = pack(
            [Group(Prompt(0, tuple(rollouts.prompt.tolist()), ""), completions)],
            rollouts.advantages[None].numpy(),
            np.ones((1, group), bool),
            aggregation="token",
            max_new_tokens=new,
            truncated="keep",
            skip_zero=False,
            temperature=1.0,
        )
        return to_device(replace(packed, sampler=None), self.device)  # as where the model itself has sampled

    def optimizer(self) -> Callable[[], Any]:
        from covey.rl.config import OptimSection
        from covey.rl.optimizer import FlatAdamW

        optimizer = FlatAdamW(self.policy.parameters(), OptimSection())
        return lambda: optimizer.step(0, 1)

    def fill_adapter(self) -> None:
        weights = self.policy.weights()
        self.policy.load_weights({name: adapter_value(name, w.shape) for name, w in weights.items()})

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.policy.parameters() if p.grad is not None]

    def zero_grad(self) -> None:
        self.policy.zero_grad()
