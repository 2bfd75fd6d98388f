"""transformers' `generate` as an engine: on a model whose every log-prob is known, and on many kinds of models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from covey.kernels.sample_inputs import draw
from covey.policies.hf import HFPolicy
from covey.policies.open import open_policy
from covey.policies.tokenizer import decode_completion, load_tokenizer
from covey.rl.batch import pack
from covey.rollout.engine import Prompt, Sampling
from covey.rollout.hf_generate import GenerateEngine
from covey.rollout.sampling import draw_states, pick

TableLm = Callable[[Any, Path], Path]
LETTER = {c: 3 + i for i, c in enumerate("\n 0123456789abcdefghijklmnopqrstuvwxyz")}


def engine_of(
    folder: Path, *, eos: Sequence[int] = (0,), max_rows: int = 256, **options: Any
) -> GenerateEngine:
    options = {"method": "full", "device": "cpu", "dtype": "float32", "reference": "none"} | options
    policy = open_policy(folder, **options)
    assert isinstance(policy, HFPolicy)
    tokenizer = load_tokenizer(folder)
    return GenerateEngine(policy, lambda ids: decode_completion(tokenizer, ids, eos), eos, max_rows=max_rows)


def prompt(row: int, *ids: int) -> Prompt:
    return Prompt(row, ids, "")


@pytest.fixture(scope="module")
def random_table() -> torch.Tensor:
    """Logits of 64 tokens after each; token 0, which ends a completion, is likely after a few."""
    table = 2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(7))
    table[::5, 0] += 5
    return table


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(9, temperature=0.7, seed=11),
        Sampling(9, temperature=1.3, top_k=12, top_p=0.8, min_p=0.02, seed=5),
        Sampling(9, temperature=0.0),
        Sampling(9, temperature=1.0, ignore_eos=True, seed=3),
    ],
)
def test_every_draw_is_the_one_its_coordinates_fix(
    sampling: Sampling, table_lm: TableLm, random_table: torch.Tensor, tmp_path: Path
) -> None:
    engine = engine_of(table_lm(random_table, tmp_path), max_rows=4)
    engine.update(engine.policy.weights(), 7)
    # The folder's own settings for sampling would change the logits.
    engine.policy.lm.generation_config.repetition_penalty = 3.0
    prompts = [prompt(4, 9), prompt(0, 5, 6, 7, 8), prompt(2, 30, 31)]
    told: dict[int, Any] = {}
    groups = engine.generate(prompts, 3, sampling, told.__setitem__)
    assert len(told) == 3 and [told[i] for i in range(3)] == groups
    assert engine.policy.lm.generation_config.repetition_penalty == 3.0
    ended = 0
    for asked, group in zip(prompts, groups, strict=True):
        assert group.prompt is asked
        for sample, completion in enumerate(group.completions):
            ids, logps, full = [asked.ids[-1]], [], []
            while len(ids) <= 9 and not (len(ids) > 1 and ids[-1] == 0 and not sampling.ignore_eos):
                row = random_table[ids[-1]].double()[None]
                state = draw_states(sampling.seed, [asked.row], [sample])
                token, logp = pick(row, sampling, draw(state, torch.tensor([len(ids) - 1])))
                temperature = sampling.temperature or 1.0
                full.append(torch.log_softmax(row / temperature, -1)[0, token].item())
                ids.append(int(token))
                logps.append(logp.item())
            assert completion.ids == tuple(ids[1:])
            assert completion.logprobs == pytest.approx(logps, abs=2e-5)
            whole = sampling.top_k == 0
            assert (
                (completion.full_logprobs is None)
                if whole
                else (completion.full_logprobs == pytest.approx(full, abs=2e-5))
            )
            assert completion.finish == ("eos" if ids[-1] == 0 and not sampling.ignore_eos else "length")
            assert completion.version == 7 and all(completion.trained)
            ended += completion.finish == "eos"
    assert sampling.ignore_eos or 0 < ended < 9 or sampling.temperature == 0


def test_stop_strings_and_ends(table_lm: TableLm, tmp_path: Path) -> None:
    """a -> b -> c -> d -> end, whatever came before."""
    table = torch.full((64, 64), -40.0)
    for first, second in ("ab", "bc", "cd", "xa"):
        table[LETTER[first], LETTER[second]] = 0.0
    table[LETTER["d"], 0] = 0.0
    engine = engine_of(table_lm(table, tmp_path))
    prompts = [prompt(0, LETTER["x"]), prompt(1, 5, 5, LETTER["b"])]

    def run(tokens: int, *stop: str) -> list[tuple[str, str, int]]:
        groups = engine.generate(prompts, 1, Sampling(tokens, stop=stop, seed=1))
        return [(g.completions[0].text, g.completions[0].finish, len(g.completions[0].ids)) for g in groups]

    assert run(8) == [("abcd", "eos", 5), ("cd", "eos", 3)]
    assert run(8, "bc", "zzz") == [("a", "stop", 3), ("cd", "eos", 3)]
    assert run(2) == [("ab", "length", 2), ("cd", "length", 2)]
    assert run(2, "d") == [("ab", "length", 2), ("c", "stop", 2)]


MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("gpt2", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", MOE),
    "attention sinks": ("gpt_oss", MOE | {"sliding_window": 3}),
    "ALiBi": ("bloom", {"n_layer": 2, "n_head": 4}),
    "a state": ("minimax", MOE | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    "soft-caps, windows": ("gemma2", {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 3.0}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_trainer_gives_the_samplers_log_probs(
    name: str, method: str, random_model: Callable[..., Path]
) -> None:
    """Prompts of several lengths, with padding or (for a state) without; in whichever company a prompt is."""
    model_type, config = MODELS[name]
    # Dropout takes any model to transformers; it is drawn only where there is a gradient.
    options: dict[str, Any] = (
        {"dropout": 0.1, "targets": ["q_proj", "out_proj"]} if "num_experts" in config else {"dropout": 0.1}
    )
    engine = engine_of(random_model(model_type, **config), method=method, max_rows=6, **options)
    with torch.no_grad():
        for tensor in engine.policy.parameters():
            tensor.add_(0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    prompts = [prompt(i, *range(3, 3 + length)) for i, length in enumerate((2, 7, 4, 7))]
    sampling = Sampling(6, temperature=0.8, seed=2)
    groups = engine.generate(prompts, 2, sampling)
    alone = engine.generate(prompts[:1], 2, sampling)
    assert [c.ids for c in alone[0].completions] == [c.ids for c in groups[0].completions]
    ones = np.ones((4, 2))
    batch = pack(
        groups,
        ones,
        ones > 0,
        aggregation="token",
        max_new_tokens=6,
        truncated="keep",
        skip_zero=False,
        temperature=0.8,
    )
    assert batch.sampler is not None
    with torch.no_grad():
        torch.testing.assert_close(engine.policy.logprobs(batch).logp, batch.sampler, rtol=0, atol=2e-5)


def test_wrong_requests_and_diverged_weights(table_lm: TableLm, tmp_path: Path) -> None:
    engine = engine_of(table_lm(torch.zeros(64), tmp_path))
    with pytest.raises(ValueError, match="the prompt of row 3 is empty"):
        engine.generate([prompt(3)], 1, Sampling(2))
    with pytest.raises(ValueError, match=r"row 5 has 2 tokens.*more than the 4096 positions"):
        engine.generate([prompt(5, 1, 1)], 1, Sampling(4095))
    with pytest.raises(ValueError, match="n is 0"):
        engine.generate([prompt(5, 1)], 0, Sampling(2))
    weights = {
        name: torch.full_like(weight, float("nan")) for name, weight in engine.policy.weights().items()
    }
    engine.update(weights, 1)
    with pytest.raises(FloatingPointError, match="after the prompt of row 5 and 0 tokens are not finite"):
        engine.generate([prompt(5, 1)], 1, Sampling(2))
    assert engine.policy.packed and engine.policy.lm.config._attn_implementation == "covey"  # as before
