"""HFPolicy against transformers and PEFT on sequences that are run one by one, in float64."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from covey.policies import hf_save
from covey.policies.hf import HFPolicy, max_positions
from covey.policies.hf_parameters import FlatParameters
from covey.policies.locate import ModelError
from covey.policies.open import choose_path, open_policy
from covey.policies.policy import Batch
from covey.rl.batch import to_device

Make = Callable[..., Path]
VOCAB = 96
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# name: (type, configuration, packed, whether the head is a matrix)
KINDS: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "learned positions, tied head": ("gpt2", {"tie_word_embeddings": True}, True, True),
    "sliding window": ("starcoder2", {"sliding_window": 3}, True, True),
    "experts": ("phimoe", MOE, True, True),
    "head with a bias": ("phi", {"tie_word_embeddings": False}, True, False),
    "attention of its own": ("falcon", {"multi_query": True}, False, True),
    "attention sinks, experts": ("gpt_oss", {**MOE, "head_dim": 8, "sliding_window": 3}, False, True),
    "linear attention, experts": (
        "minimax",
        {**MOE, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        False,
        True,
    ),
    "chunked attention": (
        "llama4_text",
        {**MOE, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 4},
        False,
        True,
    ),
}


def load(folder: Path, **options: Any) -> HFPolicy:
    options = {"method": "full", "dtype": "float64", "device": "cpu", "reference": "none"} | options
    policy = open_policy(folder, **options)
    assert isinstance(policy, HFPolicy)
    return policy


def batch_of(segments: list[tuple[int, int, int, int]], temperature: float = 1.0) -> Batch:
    """Random tokens and targets; every position is scored but some, and prompts' last ones once per completion."""
    generator = torch.Generator().manual_seed(5)
    count = segments[-1][1]
    positions = [pe - ps + t for s, e, ps, pe in segments for t in range(e - s)]
    source = sorted([*range(0, count, 2), *(pe - 1 for *_, pe in segments if pe), *range(count - 3, count)])
    draw: dict[str, Any] = {"generator": generator}
    return Batch(
        torch.randint(VOCAB, (count,), **draw),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(segments, dtype=torch.int32),
        torch.tensor(source),
        torch.randint(VOCAB, (len(source),), **draw),
        torch.zeros(len(source), dtype=torch.int32),
        torch.randn(len(source), **draw),
        torch.rand(len(source), **draw),
        temperature=temperature,
    )


# Two prompts with completions of several lengths, and a document.
BATCH = batch_of(
    [(0, 5, 0, 0), (5, 9, 0, 5), (9, 10, 0, 5), (10, 12, 0, 0), (12, 18, 10, 12), (18, 27, 0, 0)], 0.7
)


def one_by_one(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the batch, each segment run alone behind its prefix, by transformers alone."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for start, end, prefix_start, prefix_end in batch.segments.tolist():
        ids = torch.cat((batch.input_ids[prefix_start:prefix_end], batch.input_ids[start:end]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logp = torch.log_softmax(logits.double() / batch.temperature, -1)
        for m, source in enumerate(batch.source.tolist()):
            if start <= source < end:
                row = logp[source - start + prefix_end - prefix_start]
                found[m] = row[batch.target[m]], -(row.exp() * row).sum()
    logps, entropies = zip(*(found[m] for m in range(len(batch.source))), strict=True)
    return torch.stack(logps), torch.stack(entropies)


def plain(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def loss_of(logp: Tensor, entropy: Tensor | None, batch: Batch) -> Tensor:
    assert entropy is not None
    return (batch.weight * (batch.advantage * logp + 0.3 * entropy)).sum()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradients(policy: HFPolicy) -> dict[str, Tensor]:
    """By name, like `weights()`."""
    pairs = [
        pair
        for buffer in policy.flat._buffers
        for pair in zip(buffer.names, buffer.views(buffer.gradient), strict=True)
    ]
    return dict(pairs)


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_entropies_and_all_gradients_equal_transformers(
    kind: str, memory: Any, random_model: Make
) -> None:
    model_type, config, packed, matrix = KINDS[kind]
    folder = random_model(model_type, **config)
    policy = load(folder, memory=memory, tokens_per_pass=24)
    assert policy.packed is packed and (policy.head is not None) is matrix
    scored = policy.logprobs(BATCH, entropy=True, entropy_gradient=True)
    loss_of(scored.logp, scored.entropy, BATCH).backward()

    model = plain(folder)
    logp, entropy = one_by_one(model, BATCH)
    loss_of(logp, entropy, BATCH).backward()
    torch.testing.assert_close(scored.logp, logp, rtol=0, atol=1e-8)
    torch.testing.assert_close(scored.entropy, entropy, rtol=0, atol=1e-8)
    mine = gradients(policy)
    for name, parameter in model.named_parameters():
        # Outside of training mode phimoe's router has no gradient.
        assert parameter.grad is not None and (parameter.grad.any() or "router" in name), name
        torch.testing.assert_close(mine[name], parameter.grad, rtol=0, atol=1e-8, msg=name)


# These compute norms, routers or softmax in float32 whatever the dtype.
ROUNDED = {
    "gemma2": {"head_dim": 8, "sliding_window": 3, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "qwen3_moe": MOE | {"head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", ROUNDED)
def test_scales_caps_windows_and_values_narrower_than_keys_are_packed(
    model_type: str, random_model: Make
) -> None:
    folder = random_model(model_type, **ROUNDED[model_type])
    policy = load(folder)
    assert policy.packed and policy.head is not None
    scored = policy.logprobs(BATCH, entropy=True, entropy_gradient=True)
    loss_of(scored.logp, scored.entropy, BATCH).backward()
    model = plain(folder)
    logp, entropy = one_by_one(model, BATCH)
    loss_of(logp, entropy, BATCH).backward()
    torch.testing.assert_close(scored.logp, logp, rtol=0, atol=2e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients(policy)[name].double(), parameter.grad.double(), rtol=0, atol=5e-6
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"dora": True},
    "trained head": {"modules_to_save": ["lm_head"], "targets": ["q_proj", "down_proj"]},
    "trained head, tied": {"modules_to_save": ["lm_head"], "targets": ["q_proj", "down_proj"]},
    "rsLoRA, adapter on the embedding": {"rslora": True, "targets": ["embed_tokens", "up_proj"]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_adapters_are_those_of_peft(option: str, random_model: Make, tmp_path: Path) -> None:
    """Saved by HFPolicy, read by PEFT, which says what the log-probs and gradients are."""
    from peft import PeftModel, get_peft_model_state_dict

    options = {"dropout": 0.1} if option == "plain" else OPTIONS[option]
    folder = random_model("llama", tie_word_embeddings="tied" in option)
    policy = load(folder, method="lora", rank=3, alpha=5.0, **options)
    randomise(policy)
    policy.save_adapter(tmp_path, "some/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/model" and config["inference_mode"] and config["r"] == 3

    model = PeftModel.from_pretrained(
        plain(folder), tmp_path, is_trainable=True, autocast_adapter_dtype=False
    )
    model = model.double().eval()
    logp, _ = one_by_one(model, BATCH)
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(BATCH).logp, logp.detach(), rtol=0, atol=1e-6)
    if option == "plain":  # with a gradient there is dropout
        return
    (BATCH.weight * logp).sum().backward()
    (BATCH.weight * policy.logprobs(BATCH).logp).sum().backward()
    names: dict[int, str] = {}
    for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items():
        names.setdefault(tensor.data_ptr(), name)
    mine = gradients(policy)
    compared = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                mine[names[parameter.data_ptr()]],
                parameter.grad,
                rtol=0,
                atol=1e-5 * 10,
                msg=str(parameter.shape),
            )
            compared += 1
    assert compared == len(mine) >= 6


def randomise(policy: Any, scale: float = 0.2) -> None:
    """B is zero at the start, which hides errors in A's gradient. float32 values, so that saving loses nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, view in policy.weights().items():
            if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                view.copy_(scale * torch.randn(view.shape, generator=generator))


def test_a_continued_adapter_is_taken_over_and_is_the_reference(random_model: Make, tmp_path: Path) -> None:
    folder = random_model("qwen3_moe", **ROUNDED["qwen3_moe"])
    first = load(folder, method="lora", rank=3, alpha=5.0)
    base = first.logprobs(BATCH).logp.detach()
    randomise(first)
    moved = first.logprobs(BATCH).logp.detach()
    assert (moved - base).abs().max() > 0.1
    with first.reference():
        assert torch.equal(first.logprobs(BATCH).logp, base)
    first.save_adapter(tmp_path)

    second = load(folder, method="lora", rank=9, adapter=tmp_path, reference="adapter")
    assert second.rank == 3
    torch.testing.assert_close(second.logprobs(BATCH).logp.detach(), moved, rtol=0, atol=1e-9)
    with torch.no_grad():
        for tensor in second.parameters():
            tensor.mul_(0.5)
    with second.reference():
        torch.testing.assert_close(second.logprobs(BATCH).logp, moved, rtol=0, atol=1e-9)
    assert (second.logprobs(BATCH).logp - moved).abs().max() > 1e-3
    third = load(folder, method="lora", adapter=tmp_path, reference="base")
    with third.reference():
        torch.testing.assert_close(third.logprobs(BATCH).logp, base, rtol=0, atol=1e-9)

    weights = load_file(tmp_path / "adapter_model.safetensors")
    del weights[next(iter(weights))]
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ModelError, match=r"the adapter has no base_model\.model\.model\.layers\.0.*another model"
    ):
        load(folder, method="lora", adapter=tmp_path)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_reference_of_full_finetuning_is_a_copy(dtype: str, random_model: Make) -> None:
    """Also between a forward pass and its backward, which then gives the same gradient."""
    policy = load(random_model("gpt2"), dtype=dtype, reference="adapter")
    before = policy.logprobs(BATCH).logp.detach()
    policy.logprobs(BATCH).logp.sum().backward()
    expected = policy.parameters()[0].grad
    assert expected is not None
    expected = expected.clone()
    policy.zero_grad()
    pending = policy.logprobs(BATCH).logp.sum()
    with policy.reference():
        assert torch.equal(policy.logprobs(BATCH).logp, before)
    pending.backward()
    torch.testing.assert_close(policy.parameters()[0].grad, expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        policy.parameters()[0].mul_(1.1)
    assert (policy.logprobs(BATCH).logp - before).abs().max() > 0.1
    with policy.reference():
        now = policy.logprobs(BATCH)
        assert torch.equal(now.logp, before) and not now.logp.requires_grad
    without = load(random_model("gpt2"))
    with pytest.raises(ModelError, match="no copy of the weights"), without.reference():
        pass


def test_16_bit_gradients_add_up_in_32_and_masters_keep_small_updates() -> None:
    layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    weight = layer.weight
    assert isinstance(weight, torch.nn.Parameter)
    flat = FlatParameters({"weight": weight})
    (master,) = flat.masters
    assert master.dtype == torch.float32 and flat.has_shadow
    with torch.no_grad():
        master.fill_(1.0)
    flat.refresh()
    # 256 passes of gradient (2^-8, 1): in bfloat16 1 + 2^-8 is 1, and 256 + 1 is 256.
    for x in [torch.tensor([[1.0, 1.0]]), *([torch.tensor([[2.0**-8, 1.0]])] * 256)]:
        layer(x.bfloat16()).sum().backward()
    assert layer.weight.grad is None and grad_of(master).tolist() == [2.0, 257.0]
    with torch.no_grad():
        for _ in range(8):
            master -= 2.0**-11  # below half a step of bfloat16 at 1, which is 2^-9
            flat.refresh()
    assert layer.weight.tolist() == [[1 - 2.0**-8] * 2]
    assert flat.weights()["weight"].tolist() == [[1 - 2.0**-8] * 2]
    master.grad = None
    flat.refresh()
    assert grad_of(master).tolist() == [0.0, 0.0]


def test_parameters_are_split_into_buffers_by_size_and_dtype() -> None:
    sizes = {"a": 3, "b": 4, "c": 5, "d": 11, "e": 1}
    kinds = {name: torch.bfloat16 if name == "e" else torch.float32 for name in sizes}
    parameters = {n: torch.nn.Parameter(torch.full((s,), float(s), dtype=kinds[n])) for n, s in sizes.items()}
    flat = FlatParameters(parameters, limit=10)
    assert [len(m) for m in flat.masters] == [7, 5, 11, 1]
    sum((p.float() ** 2).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
    assert [grad_of(m).tolist() for m in flat.masters] == [
        [6.0] * 3 + [8.0] * 4, [10.0] * 5, [22.0] * 11, [2.0],
    ]  # fmt: skip
    flat.load({n: torch.full((s,), -float(s)) for n, s in sizes.items()})
    flat.refresh()
    assert all((p == -sizes[n]).all() for n, p in parameters.items())
    with pytest.raises(ModelError, match="z is on one side only"):
        flat.load({**flat.weights(), "z": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"a is \(4,\), expected \(3,\)"):
        flat.load({**flat.weights(), "a": torch.zeros(4)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_a_model(
    dtype: str, random_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards, experts under the names of the checkpoint, with its tokenizer; loading it gives the same policy."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(hf_save, "SHARD", "20KB")
    folder = random_model("mixtral", tie_word_embeddings=True, **MOE)
    policy = load(folder, dtype=dtype)
    with torch.no_grad():
        for tensor in policy.parameters():
            tensor.add_(0.01)
    policy.save_adapter(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and "lm_head.weight" not in index
    assert set(index) == set(load_file(folder / "model.safetensors"))
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("ab").input_ids
        == AutoTokenizer.from_pretrained(folder)("ab").input_ids
    )

    expected = policy.logprobs(BATCH).logp.detach()
    if dtype == "float32":
        logp, _ = one_by_one(plain(tmp_path, torch.float32), BATCH)
        torch.testing.assert_close(expected, logp.detach().float(), rtol=0, atol=1e-5)
    assert torch.equal(load(tmp_path, dtype=dtype).logprobs(BATCH).logp, expected)
    other = load(folder, dtype=dtype)
    other.load_saved(tmp_path)
    assert torch.equal(other.logprobs(BATCH).logp, expected)
    if dtype == "bfloat16":  # the files are rounded, the state is not
        assert any(
            not torch.equal(a, b) for a, b in zip(other.parameters(), policy.parameters(), strict=True)
        )
    other.load_state(policy.state())
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), policy.parameters(), strict=True))


def test_dropout_is_drawn_where_there_is_a_gradient_and_again_in_the_backward(random_model: Make) -> None:
    gathered = []
    for memory in ("fast", "lean"):
        policy = load(random_model("llama"), method="lora", dropout=0.5, memory=memory, rank=4)
        randomise(policy)
        with torch.no_grad():
            still = [policy.logprobs(BATCH).logp for _ in range(2)]
        assert torch.equal(*still)
        torch.manual_seed(1)
        logp = policy.logprobs(BATCH).logp
        assert (logp - still[0]).abs().max() > 0.05
        with policy.reference():  # changes nothing in what is still to be differentiated
            policy.logprobs(BATCH)
        logp.sum().backward()
        assert policy.parameters()[0].grad is not None
        gathered += [logp.detach(), policy.parameters()[0].grad]
    torch.testing.assert_close(gathered[0], gathered[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(gathered[1], gathered[3], rtol=0, atol=1e-10)


def test_four_bits_are_those_of_bitsandbytes_for_linears_and_experts(random_model: Make) -> None:
    """The same log-probs as a model whose weights are what bitsandbytes makes of them."""
    from bitsandbytes import functional

    folder = random_model("qwen3_moe", **ROUNDED["qwen3_moe"])
    policy = load(folder, method="qlora", dtype="float32", rank=2)
    assert policy.packed
    model = plain(folder, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 or ("proj" in name and "experts" not in name):
                packed, state = functional.quantize_4bit(
                    parameter, blocksize=64, compress_statistics=True, quant_type="nf4"
                )
                parameter.copy_(functional.dequantize_4bit(packed, state).view(parameter.shape))
    logp, _ = one_by_one(model, BATCH)
    torch.testing.assert_close(policy.logprobs(BATCH).logp.detach(), logp.detach().float(), rtol=0, atol=1e-4)
    exact, _ = one_by_one(plain(folder, torch.float32), BATCH)
    assert (exact - logp).abs().max() > 1e-2  # it really is quantised
    randomise(policy)
    gathered = []
    for memory in ("fast", "lean"):
        policy = load(folder, method="qlora", dtype="float32", rank=2, memory=memory)
        randomise(policy)
        policy.logprobs(BATCH).logp.sum().backward()
        gathered.append(policy.parameters()[0].grad)
    torch.testing.assert_close(*gathered, rtol=1e-5, atol=1e-5)


def test_one_document_does_not_see_another(random_model: Make) -> None:
    """B23, packed and in rows: changing a token of document 1 leaves document 2 as it was, bit for bit."""
    for kind in ("learned positions, tied head", "attention of its own"):
        policy = load(random_model(KINDS[kind][0], **KINDS[kind][1]), dtype="float32")
        before = policy.logprobs(BATCH).logp
        ids = BATCH.input_ids.clone()
        ids[1] = (ids[1] + 1) % VOCAB
        changed = replace(BATCH, input_ids=ids)
        after = policy.logprobs(changed).logp
        second = BATCH.source >= 10
        assert torch.equal(before[second], after[second]) and not torch.equal(before[~second], after[~second])


def test_which_path_a_model_takes_and_why(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, MambaConfig

    assert choose_path(tiny_llama).path == "decoder"
    asked: list[tuple[dict[str, Any], str]] = [
        ({"method": "full"}, "model.method is full"),
        ({"dropout": 0.1, "dora": True}, "lora.dropout and lora.dora"),
        ({"modules_to_save": ["lm_head"]}, "lora.modules_to_save"),
        ({"targets": ["q_proj", "lm_head"]}, "lm_head"),
    ]
    for options, why in asked:
        route = choose_path(tiny_llama, **options)
        assert route.path == "transformers" and why in route.why
        assert (route.vocab_size, route.max_positions) == (96, 1024)
        assert route.num_parameters == choose_path(tiny_llama).num_parameters
    assert max_positions(GPT2Config(n_positions=77)) == 77 and max_positions(MambaConfig()) == 1 << 30

    load(tiny_llama, method="lora", dora=True).save_adapter(tmp_path / "dora")
    route = choose_path(tiny_llama, adapter=tmp_path / "dora")
    assert route.path == "transformers" and "dora" in route.why.lower()
    with pytest.raises(ModelError, match=r"model\.adapter: full finetuning has none"):
        open_policy(tiny_llama, method="full", adapter=tmp_path / "dora")
    with pytest.raises(
        ModelError, match=r"PEFT cannot make this adapter \(Target modules .*c_attn.* not found"
    ):
        load(tiny_llama, method="lora", dora=True, targets=["c_attn"])
    with pytest.raises(ModelError, match="bitsandbytes does not quantise float64"):
        load(tiny_llama, method="qlora", dora=True)

    stored = tmp_path / "stored"
    shutil.copytree(tiny_llama, stored)
    config = json.loads((stored / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (stored / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ModelError, match=r"stored quantised \(bitsandbytes\)"):
        load(stored)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
@pytest.mark.parametrize("kind", ["learned positions, tied head", "experts", "attention sinks, experts"])
def test_a_gpu_follows_the_cpu_in_bf16(kind: str, method: Any, random_model: Make) -> None:
    """bf16 keeps 8 bits, and a router that rounds may choose another expert: most log-probs agree, and the gradients'
    directions, more closely where there is no router."""
    model_type, config, packed, _ = KINDS[kind]
    folder = random_model(model_type, **config)
    targets = ["q_proj", "v_proj", "o_proj", "c_attn", "c_proj"]
    options: dict[str, Any] = {"method": method, "targets": targets, "rank": 4, "dtype": "bfloat16"}
    logps, grads = [], []
    for device in ("cpu", "cuda"):
        policy = load(folder, **options | {"device": device, "reference": "adapter"})
        assert policy.packed is packed
        randomise(policy)
        batch = to_device(BATCH, policy.device)
        scored = policy.logprobs(batch, entropy=True)
        (batch.advantage * scored.logp).sum().backward()
        logps.append(scored.logp.detach().cpu().double())
        grads.append(torch.cat([p.grad.cpu().double() for p in policy.parameters() if p.grad is not None]))
    assert (logps[0] - logps[1]).abs().median() < 0.1
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > (0.7 if "experts" in kind else 0.97)
    if method == "full":
        with torch.no_grad():
            for tensor in policy.parameters():
                tensor.mul_(1.5)
        with policy.reference():
            assert torch.equal(policy.logprobs(to_device(BATCH, policy.device)).logp.cpu().double(), logps[1])


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_16_bit_full_finetuning_on_a_gpu_lowers_the_loss(memory: Any, random_model: Make) -> None:
    policy = load(
        random_model("qwen3_moe", **ROUNDED["qwen3_moe"]), dtype="bfloat16", device="cuda", memory=memory
    )
    batch = to_device(BATCH, policy.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = -policy.logprobs(batch).logp.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
