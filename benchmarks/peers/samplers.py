"""The peers as samplers: each loads the folder in its own way, and completes prompts.

`start` makes what the peer samples with once the weights are there; `generate` returns after the last token. Those that
train besides have `grpo`: seconds of whole GRPO steps on these prompts.

Axes: P prompts, G completions of each.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.peers.inputs import adapter_value
from benchmarks.peers.models import ALPHA, RANK, HuggingFace, Trl, Unsloth, load
from torch import Tensor

Ids = list[list[int]]
WARM_UP = 8  # tokens, where nothing is compiled or recorded for a length
BLOCK = 128  # tokens; vLLM's blocks of keys and values are 16 on a GPU and 128 on a CPU


@dataclass(frozen=True)
class Settings:
    """rows: most completions at a time. longest: tokens of a prompt with its completion. ends: ids that end one.

    root: where files may be written. tokens_per_pass: of covey's trainer.
    """

    folder: Path
    root: Path
    method: str  # qlora or lora
    memory: str  # covey's
    rows: int
    longest: int
    ends: tuple[int, ...] = ()
    tokens_per_pass: int = 8192


def sampler(peer: str, settings: Settings) -> "CoveySampler | Generate | Vllm":
    if peer == "covey":
        return CoveySampler(settings)
    if peer.startswith("vllm"):
        return Vllm(settings, quantise=settings.method == "qlora" and peer == "vllm")
    return Generate(peer, settings)


class CoveySampler:
    """The policy with its in-process engine. Its text is not looked at, as in the peers."""

    warm_up: int | None = None  # tokens; None: as many as are timed

    def __init__(self, settings: Settings):
        peer: Any = load("covey", settings.folder, settings.method, settings.memory, settings.longest)
        peer.fill_adapter()
        self.policy, self.settings = peer.policy, settings

    def start(self) -> None:
        from covey.rollout.inprocess import InProcessEngine

        self.engine = InProcessEngine(
            self.policy, lambda ids: "", self.settings.ends, max_rows=self.settings.rows
        )
        self.engine.wake()

    def generate(self, prompts: Ids, group: int, new: int, seed: int, *, greedy: bool = False) -> Ids:
        groups = self.groups(prompts, group, new, seed, greedy=greedy)
        return [list(completion.ids) for group_ in groups for completion in group_.completions]

    def groups(self, prompts: Ids, group: int, new: int, seed: int, *, greedy: bool = False) -> list[Any]:
        from covey.rollout.engine import Prompt, Sampling

        asked = [Prompt(row, tuple(ids), "") for row, ids in enumerate(prompts)]
        return self.engine.generate(
            asked, group, Sampling(new, temperature=0.0 if greedy else 1.0, seed=seed)
        )

    def agreement(self, prompts: Ids, group: int, new: int, seed: int) -> dict[str, float]:
        """How far the sampler's log-probs are from those that the trainer finds for the same tokens."""
        from covey.rl.batch import pack, split, to_device

        groups = self.groups(prompts, group, new, seed)
        self.engine.sleep()
        ones_PG = np.ones((len(groups), group))
        batch = pack(
            groups, ones_PG, ones_PG > 0,
            aggregation="token", max_new_tokens=new, truncated="keep", skip_zero=False, temperature=1.0,
        )  # fmt: skip
        trainer, engine = [], []
        with torch.no_grad():
            for part in split(batch, self.settings.tokens_per_pass):
                assert part.sampler is not None
                trainer.append(self.policy.logprobs(to_device(part, self.policy.device)).logp.cpu())
                engine.append(part.sampler)
        self.engine.wake()
        return disagreement(torch.cat(trainer), torch.cat(engine))

    def grpo(self, prompts: Ids, group: int, new: int, steps: int) -> dict[str, float]:
        """Medians over `steps` steps of rl/grpo.py after a first one."""
        from covey.rewards.reward import RewardSpec, load_reward
        from covey.rewards.runner import Scorer
        from covey.rl.config import GrpoConfig
        from covey.rl.entropy import EntropyBonus
        from covey.rl.grpo import GrpoMachine, grpo_step
        from covey.rl.optimizer import FlatAdamW
        from covey.rollout.engine import Prompt

        rollout = {"prompts_per_step": len(prompts), "group_size": group, "max_new_tokens": new}
        config = GrpoConfig.model_validate(
            {
                "model": {"path": str(self.settings.folder)},
                "data": {"train": "not read"},
                "rollout": rollout,
                "optim": {"steps": steps + 1, "tokens_per_pass": self.settings.tokens_per_pass},
            }
        )
        policy = self.policy
        machine = GrpoMachine(
            policy,
            self.engine,
            Scorer([load_reward(RewardSpec(spread))]),
            FlatAdamW(policy.parameters(), config.optim),
            EntropyBonus(config.objective),
            policy.device,
        )
        asked = [Prompt(row, tuple(ids), "") for row, ids in enumerate(prompts)]
        self.engine.sleep()
        laps = [grpo_step(machine, asked, config, step)[0] for step in range(steps + 1)]
        self.engine.wake()
        names = {"step_s": "step", "sample_s": "rollout", "reward_s": "reward", "learn_s": "train"}
        return {
            key: statistics.median(lap[f"time/{name}_s"] for lap in laps[1:]) for key, name in names.items()
        }


def spread(completion: str, completion_ids: list[int]) -> float:
    """A reward that costs nothing and differs within every group."""
    return sum(completion_ids) % 97 / 97


def disagreement(trainer_M: Tensor, sampler_M: Tensor) -> dict[str, float]:
    """Of log-probs of the same M tokens: mean absolute difference, share of probability ratios outside 0.9 to 1.1."""
    difference_M = trainer_M.double() - sampler_M.double()
    ratio_M = difference_M.exp()
    outside = ((ratio_M < 0.9) | (ratio_M > 1.1)).double().mean()
    return {"logp_difference": difference_M.abs().mean().item(), "ratios_outside": outside.item()}


class Generate:
    """`generate` of transformers on the model of a peer (models.py): hf, hf-static, unsloth, unsloth-graphs, trl."""

    def __init__(self, peer: str, settings: Settings):
        name, _, variant = peer.partition("-")
        model: Any = load(name, settings.folder, settings.method, settings.memory, settings.longest)
        model.fill_adapter()
        self.peer: HuggingFace = model
        self.settings = settings
        self.options = {"cache_implementation": "static"} if variant == "static" else {}
        self.warm_up = None if variant else WARM_UP

    def start(self) -> None:
        if isinstance(self.peer, Unsloth):
            from unsloth import FastLanguageModel  # type: ignore

            FastLanguageModel.for_inference(self.peer.model)
        self.peer.model.eval()

    def generate(self, prompts: Ids, group: int, new: int, seed: int, *, greedy: bool = False) -> Ids:
        ends = self.settings.ends
        ids = torch.tensor([prompt for prompt in prompts for _ in range(group)], device=self.peer.device)
        # Where nothing is to end a row, the end-of-sequence token is made impossible.
        limits = {"eos_token_id": list(ends)} if ends else {"min_new_tokens": new}
        how = (
            {"do_sample": False}
            if greedy
            else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        )
        torch.manual_seed(seed)
        with torch.inference_mode(), self.peer.autocast():
            out = self.peer.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                use_cache=True,
                pad_token_id=0,
                **limits,
                **how,
                **self.options,
            )
        return [up_to_end(row, ends) for row in out[:, ids.shape[1] :].tolist()]

    def grpo(self, prompts: Ids, group: int, new: int, steps: int) -> dict[str, float]:
        """Medians over `steps` steps of GRPOTrainer after a first one; sampling includes the reward."""
        assert isinstance(self.peer, Trl)
        if isinstance(self.peer, Unsloth):
            from unsloth import FastLanguageModel  # type: ignore

            FastLanguageModel.for_training(self.peer.model)
        return trainer_steps(
            self.peer, self.settings.root, (len(prompts), len(prompts[0])), group, new, steps
        )


def up_to_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """The row with its first end and without what follows, which is padding."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def trainer_steps(
    peer: Trl, root: Path, shape: tuple[int, int], group: int, new: int, steps: int
) -> dict[str, float]:
    """GRPOTrainer (TRL's, or the one that Unsloth puts in its place) on prompts of this shape. They are texts, of
    letters because each is one token of the byte tokenizer."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer  # type: ignore

    gpu = peer.device.type == "cuda"
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, size=shape)
    texts = ["".join(map(chr, row)) for row in letters]
    config = GRPOConfig(
        output_dir=str(root / "trainer"),
        per_device_train_batch_size=shape[0] * group,
        num_generations=group,
        gradient_accumulation_steps=1,
        max_completion_length=new,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        learning_rate=1e-5,
        optim="adamw_8bit" if gpu else "adamw_torch",
        max_steps=steps + 1,
        save_strategy="no",
        gradient_checkpointing=True,
        bf16=gpu,
        use_cpu=not gpu,
        use_vllm=False,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=peer.model,
        reward_funcs=lambda completions, completion_ids, **columns: [
            spread("", ids) for ids in completion_ids
        ],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=peer.tokenizer(),
    )
    ended, sampling = [], []
    sample = trainer._generate_and_score_completions

    def timed_sample(*args: Any, **kwargs: Any) -> Any:
        start = now()
        out = sample(*args, **kwargs)
        sampling.append(now() - start)
        return out

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ended.append(now())

    trainer._generate_and_score_completions = timed_sample
    trainer.add_callback(Ends())
    trainer.train()
    # A step lasts from the end of the one before: sampling comes before what the trainer calls a step's beginning.
    whole = statistics.median(end - before for before, end in pairwise(ended))
    sampled = statistics.median(sampling[1:])
    return {"step_s": whole, "sample_s": sampled, "learn_s": whole - sampled}


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Vllm:
    """vLLM in this process, with CUDA graphs for decoding and without torch.compile, its cache sized for the rows.

    A group's prompt is computed once through the prefix cache, which is emptied before every call. Constructing the
    engine reads the weights: `start` has what the other peers do while they load.
    """

    warm_up: int | None = None

    def __init__(self, settings: Settings, *, quantise: bool):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        from vllm import LLM  # type: ignore

        self.engine, self.settings, self.quantise = LLM, settings, quantise

    def start(self) -> None:
        from vllm.lora.request import LoRARequest  # type: ignore

        from covey.policies.spec import read_spec

        spec, gpu = read_spec(self.settings.folder), torch.cuda.is_available()
        per_row = -(-self.settings.longest // BLOCK) * BLOCK
        bytes_per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * (2 if gpu else 4)
        graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
        self.llm = self.engine(
            model=str(self.settings.folder),
            dtype="bfloat16" if gpu else "float32",
            quantization="bitsandbytes" if self.quantise else None,
            max_model_len=per_row,
            max_num_seqs=self.settings.rows,
            kv_cache_memory_bytes=(self.settings.rows + 1) * per_row * bytes_per_token,
            enable_prefix_caching=True,
            enable_lora=True,
            max_lora_rank=RANK,
            max_loras=1,
            gpu_memory_utilization=0.5,  # only asked for: with the cache's size given, nothing is taken by it
            disable_log_stats=True,
            seed=0,
            **(graphs if gpu else {"enforce_eager": True}),
        )
        self.lora = LoRARequest("adapter", 1, str(adapter_folder(self.settings.folder, self.settings.root)))

    def generate(self, prompts: Ids, group: int, new: int, seed: int, *, greedy: bool = False) -> Ids:
        from vllm import SamplingParams  # type: ignore

        sampling = SamplingParams(
            n=group,
            temperature=0.0 if greedy else 1.0,
            max_tokens=new,
            ignore_eos=True,
            stop_token_ids=list(self.settings.ends) or None,
            logprobs=0,  # those of the sampled tokens
            detokenize=False,
        )
        self.llm.reset_prefix_cache()
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        groups = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=self.lora)
        return [list(completion.token_ids) for group_ in groups for completion in group_.outputs]


def adapter_folder(model: Path, root: Path) -> Path:
    """The common adapter as a folder in PEFT's format."""
    from covey.policies.adapter import Adapter
    from covey.policies.spec import read_spec

    cpu = torch.device("cpu")
    adapter = Adapter(read_spec(model), RANK, ALPHA, "all-linear", compute_dtype=torch.float32, device=cpu)
    adapter.load({name: adapter_value(name, weight.shape) for name, weight in adapter.weights().items()})
    adapter.save(root / "adapter", str(model))
    return root / "adapter"
