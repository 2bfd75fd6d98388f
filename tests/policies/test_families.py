"""Every family of the decoder against transformers and PEFT: tiny random checkpoints with the family's odd parts on.

transformers computes norms, rotary tables and softmax in float32 whatever the model's dtype; here it is made to do so
in float64 (`widened`), which leaves rounding no room to hide a wrong formula in.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from covey.policies.decoder import DecoderPolicy
from covey.policies.families import FAMILIES, families_table
from covey.policies.load import load_policy
from covey.policies.locate import ModelError
from covey.policies.policy import Batch
from covey.policies.spec import WITH_IMAGES, OutsideDecoder, read_spec

F64 = torch.float64
VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}
# Short and long factors of the 3 frequencies that 3/4 of a head of 8 have.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.0, 4.0],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (family, what its configuration says besides SIZES)
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 12, "attention_bias": True, "rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 4, "head_dim": 12}),
    "ministral": ("ministral", {"sliding_window": 4, "layer_types": MIXED, "head_dim": 12}),
    "ministral3": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "smollm3": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": MIXED,
        },
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": LONGROPE, "sliding_window": 5, "original_max_position_embeddings": 64},
    ),
    "phi3, plain": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "gemma": ("gemma", {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 12,
            "layer_types": MIXED,
            "sliding_window": 4,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "head_dim": 12,
            "layer_types": MIXED,
            "sliding_window": 4,
            "query_pre_attn_scalar": 5,
            "rope_parameters": TWO_ROPES,
            "tie_word_embeddings": True,
        },
    ),
    "olmo": ("olmo", {"attention_bias": True, "clip_qkv": 1.5}),
    "olmo, unclipped": ("olmo", {}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": (
        "olmo3",
        {"layer_types": MIXED, "sliding_window": 4, "rope_parameters": TWO_ROPES},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "layer_norm_eps": 1e-3}),
    "stablelm, half rotary": (
        "stablelm",
        {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.7,
            "use_post_norm": True,
        },
    ),
    "exaone4": ("exaone4", {"layer_types": MIXED, "sliding_window": 4}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": True, "head_dim": 12}),
    "cwm": (
        "cwm",
        {
            "layer_types": MIXED,
            "sliding_window": 4,
            "head_dim": 8,
            "rope_parameters": LLAMA3,
            "bos_token_id": 0,
        },
    ),
    "gemma3": (  # with an eye
        "gemma3_text",
        {
            "head_dim": 12,
            "layer_types": MIXED,
            "sliding_window": 4,
            "rope_parameters": TWO_ROPES,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}),
    "vaultgemma": (
        "vaultgemma",
        {"head_dim": 12, "layer_types": MIXED, "sliding_window": 4, "attn_logit_softcapping": 3.0},
    ),
    "internlm3": ("internlm3", {"qkv_bias": True, "bias": True, "head_dim": 12}),
    "iquestcoder": ("iquestcoder", {"head_dim": 12}),
}


def known(family: str) -> bool:
    return family in transformers.CONFIG_MAPPING


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """folder_of(case) writes the checkpoint of a case once: random, norms and biases far from 1 and 0."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            family, changes = CASES[case]
            made[case] = tmp_path_factory.mktemp(family)
            config = transformers.AutoConfig.for_model(family, **SIZES | changes)
            if case in WITH_IMAGES:
                config = with_an_eye(case, config)
            write_checkpoint(config, made[case])
        return made[case]

    return folder


def with_an_eye(kind: str, text: Any) -> Any:
    """The configuration of a model that reads images too, whose text part is `text`."""
    eye = {
        "model_type": "siglip_vision_model" if kind == "gemma3" else "pixtral",
        "hidden_size": 16,
        "image_size": 28,
    }
    eye |= {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
    tied = text.tie_word_embeddings
    return transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=eye, tie_word_embeddings=tied
    )


def model_class(config: Any) -> Any:
    images = config.model_type in WITH_IMAGES
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def write_checkpoint(config: Any, folder: Path) -> None:
    from covey.policies.tiny import byte_tokenizer

    torch.manual_seed(0)
    model = model_class(config).from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # Gemma's are 1 + w
                weight.copy_(weight + 0.3 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@contextmanager
def widened() -> Iterator[None]:
    """Whoever asks torch for float32 gets float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", F64)
        patch.setattr(torch, "float", F64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def packed_batch() -> Batch:
    """Two prompts with completions and one document, longer than the windows above: 31 tokens, 18 scored."""
    generator = torch.Generator().manual_seed(3)
    segments = [(0, 6, 0, 0), (6, 11, 0, 6), (11, 12, 0, 6), (12, 15, 0, 0), (15, 22, 12, 15), (22, 31, 0, 0)]
    positions = [*range(6), *range(6, 11), 6, *range(3), *range(3, 10), *range(9)]
    source = torch.tensor([5, 6, 7, 8, 9, 5, 14, 15, 16, 17, 18, 19, 20, 22, 24, 26, 28, 29])
    return Batch(
        torch.randint(VOCAB, (31,), generator=generator),
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(segments, dtype=torch.int32),
        source,
        torch.randint(VOCAB, (18,), generator=generator),
        torch.arange(18, dtype=torch.int32),
        torch.randn(18, generator=generator),
        torch.rand(18, generator=generator),
        temperature=0.8,
    )


def randomise(policy: DecoderPolicy, size: float = 0.2) -> None:
    """Draws A and B (which starts at 0) as float32 numbers, so that saving loses nothing."""
    flat = policy.parameters()[0]
    noise = size * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        flat.copy_(noise)


def adapted_transformers(folder: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """transformers + PEFT with the adapter, trainable."""
    from peft import PeftModel

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = model_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(folder, **options)
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(dtype).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("embed_scale"):  # Gemma's sqrt(hidden size), rounded to float32 when it was made
            buffer.fill_(model.config.get_text_config().hidden_size ** 0.5)
    return model


def logprobs_alone(model: Any, batch: Batch) -> torch.Tensor:
    """[M], every segment as a sequence of its own behind a copy of its prefix."""
    parts: dict[int, torch.Tensor] = {}
    for start, end, prefix, prefix_end in batch.segments.tolist():
        ids = torch.cat((batch.input_ids[prefix:prefix_end], batch.input_ids[start:end]))
        table = (model(ids[None]).logits[0] / batch.temperature).log_softmax(-1)
        for m, (source, target) in enumerate(zip(batch.source.tolist(), batch.target.tolist(), strict=True)):
            if start <= source < end:
                parts[m] = table[prefix_end - prefix + source - start, target]
    return torch.stack([parts[m] for m in range(len(batch.source))])


def loss(logp: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (batch.weight * batch.advantage * logp.exp()).sum()


def check_against_transformers(
    folder: Path, tmp_path: Path, dtype: torch.dtype, tolerance: float, memory: Any
) -> None:
    """Logits of a sequence, log-probs of a packed batch, and the gradient of every A and B."""
    name = str(dtype).removeprefix("torch.")
    options: dict[str, Any] = {"method": "lora", "dtype": name, "device": "cpu", "rank": 3, "alpha": 5.0}
    policy = load_policy(folder, memory=memory, **options)
    randomise(policy)
    policy.save_adapter(tmp_path)
    ids = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    batch = packed_batch()
    model = adapted_transformers(folder, tmp_path, dtype)
    with widened() if dtype == F64 else pytest.MonkeyPatch.context():
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        expected = logprobs_alone(model, batch)
        loss(expected, batch).backward()
    assert logits.std() > 0.3, "a flat distribution would prove nothing"
    torch.testing.assert_close(policy.forward_logits(ids.tolist()), logits, rtol=0, atol=tolerance)
    mine = policy.logprobs(batch).logp
    torch.testing.assert_close(mine.detach(), expected.detach(), rtol=0, atol=tolerance)
    loss(mine, batch).backward()
    theirs = {k.replace(".default.", "."): p.grad for k, p in model.named_parameters() if "lora_" in k}
    grads = split_like_weights(policy)
    assert theirs.keys() == grads.keys()
    for key, grad in grads.items():
        assert theirs[key].abs().max() > 1e-6, key
        text = lambda message, key=key: f"{key}: {message}"  # noqa: E731
        torch.testing.assert_close(grad, theirs[key], rtol=0, atol=tolerance, msg=text)


def split_like_weights(policy: DecoderPolicy) -> dict[str, torch.Tensor]:
    """The flat gradient by PEFT's names: weights() are views, so their places in the buffer are known."""
    flat = policy.parameters()[0]
    assert flat.grad is not None
    return {
        name: flat.grad.as_strided(view.shape, view.stride(), view.storage_offset())
        for name, view in policy.weights().items()
    }


@pytest.mark.parametrize("case", CASES)
def test_float64_equals_transformers_and_peft(case, folder_of, tmp_path):
    if not known(CASES[case][0]):
        pytest.skip("this transformers does not know the family")
    memory = "lean" if list(CASES).index(case) % 2 else "fast"
    check_against_transformers(folder_of(case), tmp_path, F64, 1e-8, memory)


@pytest.mark.parametrize("case", [family for family in FAMILIES if family in CASES])
def test_float32_equals_transformers_and_peft(case, folder_of, tmp_path):
    if not known(CASES[case][0]):
        pytest.skip("this transformers does not know the family")
    memory = "fast" if list(CASES).index(case) % 2 else "lean"
    check_against_transformers(folder_of(case), tmp_path, torch.float32, 1e-4, memory)


def test_every_family_has_a_case_and_a_row_in_the_documents():
    assert {family for family, _ in CASES.values()} == set(FAMILIES)
    rows = families_table().splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == list(FAMILIES)
    assert all(row.count("|") == 4 for row in rows)
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert families_table() in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_size_of_the_base_model(case, folder_of):
    if not known(CASES[case][0]):
        pytest.skip("this transformers does not know the family")
    from safetensors.torch import load_file

    stored = load_file(folder_of(case) / "model.safetensors")
    count = sum(w.numel() for name, w in stored.items() if not name.startswith(("vision", "multi_modal")))
    assert read_spec(folder_of(case)).num_parameters == count


def test_only_a_batch_that_a_window_reaches_into_needs_an_attention_with_windows(folder_of, monkeypatch):
    """As on GPUs where FlashAttention, which has none, is the fastest."""
    kinds = {0: "dense", 4: "triton"}
    monkeypatch.setattr("covey.policies.decoder.pick_kind", lambda *args: kinds[args[4]])
    policy = load_policy(folder_of("mistral"), method="lora", dtype="float32", device="cpu")
    short, long = [[0, 3, 0, 0], [3, 4, 0, 3]], [[0, 3, 0, 0], [3, 5, 0, 3]]
    plans = [policy.plan(torch.tensor(segments, dtype=torch.int32)) for segments in (short, long)]
    assert [(plan.kind, plan.longest) for plan in plans] == [("dense", 4), ("triton", 5)]


@pytest.mark.parametrize(("case", "longest", "context"), [("phi3", 64, 256), ("llama, dynamic", 256, 300)])
def test_a_longer_context_takes_the_frequencies_of_that_context(case, longest, context, folder_of):
    """As transformers does for a sequence of that length; without it the frequencies are those of the short ones."""
    folder = folder_of(case)
    options: dict[str, Any] = {"method": "lora", "dtype": "float32", "device": "cpu"}
    assert read_spec(folder).max_positions == longest
    policy = load_policy(folder, context=context, **options)
    assert policy.spec.max_positions == context
    ids = torch.randint(VOCAB, (context,), generator=torch.Generator().manual_seed(5))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = model(ids[None]).logits[0].detach()
    torch.testing.assert_close(policy.forward_logits(ids.tolist()), theirs, rtol=0, atol=1e-4)
    short = load_policy(folder, **options).forward_logits(ids[:20].tolist())
    assert (short - theirs[:20]).abs().max() > 1e-3


def test_a_context_beyond_the_model_is_refused(folder_of):
    with pytest.raises(ModelError, match="300 tokens of context are wanted, the model has 256 positions"):
        read_spec(folder_of("llama"), 300)
    with pytest.raises(ModelError, match="the model has 64 positions"):  # its queries grow from there on
        read_spec(folder_of("ministral3"), 100)


def test_what_the_decoder_does_not_cover_is_named(tmp_path):
    llama = transformers.LlamaConfig(**SIZES).to_dict()
    for changes, message in [
        ({"model_type": "mamba"}, '"mamba" is not one that covey\'s decoder covers'),
        ({"hidden_act": "relu2"}, 'activation "relu2" is none of silu'),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, 'rope_type "spiral" is unknown'),
        ({"quantization_config": {"quant_method": "gptq"}}, "stored quantised by gptq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "8 bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "fp4"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(llama | changes))
        with pytest.raises(OutsideDecoder, match=message):
            read_spec(tmp_path)
    stablelm = transformers.StableLmConfig(**SIZES).to_dict()
    for option, why in [
        ("use_parallel_residual", "in covey's decoder the MLP reads what the attention adds"),
        ("qk_layernorm", "covey's decoder norms q and k by root mean square alone"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(stablelm | {option: True}))
        with pytest.raises(OutsideDecoder, match=rf"config\.json: {option} is set; {why}"):
            read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not a JSON file"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama | {"hidden_size": "many"}))
    with pytest.raises(ModelError, match=r"transformers .* does not take it"):
        read_spec(tmp_path)


def flat_gradient(
    folder: Path, dtype: str, device: str, memory: Any = "fast", recorded: bool = True
) -> torch.Tensor:
    """The whole adapter's gradient in float64 on the CPU."""
    from covey.rl.batch import to_device

    policy = load_policy(folder, method="lora", dtype=dtype, device=device, memory=memory, rank=3)
    policy.recorded = policy.recorded if recorded else None
    randomise(policy, 0.05)
    batch = to_device(packed_batch(), policy.device)
    (batch.weight * policy.logprobs(batch).logp).sum().backward()
    grad = policy.parameters()[0].grad
    assert grad is not None
    return grad.cpu().double()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3_text", "stablelm"])
def test_the_triton_kernels_give_the_gradient_of_the_references(case, folder_of, monkeypatch):
    """Which equals transformers'. Gemma 3: norms of 1 + w, of heads and behind each part, windows through prefixes.

    StableLM: layer norms.
    """
    folder = folder_of(case)
    expected = flat_gradient(folder, "float64", "cpu")
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    torch.testing.assert_close(flat_gradient(folder, "float64", "cpu"), expected, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_bf16_on_a_gpu_is_as_good_as_on_a_cpu(case, folder_of):
    """The same roundings in another order: no more than twice the error of torch's own operations."""
    if not known(CASES[case][0]):
        pytest.skip("this transformers does not know the family")
    folder = folder_of(case)
    exact, cpu = (flat_gradient(folder, dtype, "cpu") for dtype in ("float64", "bfloat16"))
    allowed = 2 * (cpu - exact).norm() + 0.02 * exact.norm()
    fast, lean = (flat_gradient(folder, "bfloat16", "cuda", memory, False) for memory in ("fast", "lean"))
    # Recordings are of more tokens, so their products may round otherwise.
    recorded = flat_gradient(folder, "bfloat16", "cuda")
    assert (fast - exact).norm() <= allowed and (recorded - exact).norm() <= allowed
    assert (fast - lean).norm() <= 1e-3 * fast.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("case", ["gemma3_text", "olmo", "olmo3", "granite", "stablelm"])
def test_a_pass_never_waits_for_the_device(case, memory, folder_of):
    from covey.rl.batch import to_device

    policy = load_policy(folder_of(case), method="lora", dtype="bfloat16", device="cuda", memory=memory)
    batch = to_device(packed_batch(), "cuda")

    def step() -> None:
        loss(policy.logprobs(batch).logp, batch).backward()
        policy.zero_grad()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES)
def test_the_engine_continues_as_transformers_and_peft_do(case, folder_of, tmp_path, monkeypatch):
    """Greedily, for prompts of mixed lengths, where there is so little room that rows leave and come back."""
    if not known(CASES[case][0]):
        pytest.skip("this transformers does not know the family")
    from covey.rollout import schedule
    from covey.rollout.engine import Prompt, Sampling
    from covey.rollout.inprocess import InProcessEngine

    monkeypatch.setattr(schedule, "FIRST_ROOM", 2)
    policy = load_policy(folder_of(case), method="lora", dtype="float32", device="cpu", rank=3, alpha=5.0)
    randomise(policy)
    policy.save_adapter(tmp_path)
    generator = torch.Generator().manual_seed(5)
    prompts = [
        Prompt(i, tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist()), "")
        for i, n in enumerate((1, 13, 5))
    ]
    engine = InProcessEngine(policy, str, [0], places=40)  # of 16 + 3 * 12
    groups = engine.generate(prompts, 1, Sampling(12, temperature=0.0))
    model = adapted_transformers(folder_of(case), tmp_path, torch.float32)
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.ids])
        settings = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 0, "pad_token_id": 1}
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        assert list(group.completions[0].ids) == out[0, len(prompt.ids) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_the_engine_reports_the_decoders_log_probs(case, folder_of):
    if not known(CASES[case][0]):
        pytest.skip("this transformers does not know the family")
    from covey.rollout.engine import Prompt, Sampling
    from covey.rollout.inprocess import InProcessEngine

    policy = load_policy(folder_of(case), method="lora", dtype="float64", device="cpu", rank=3)
    randomise(policy)
    prompts = [Prompt(i, tuple(range(3, 3 + n)), "") for i, n in enumerate((9, 2))]
    for group in InProcessEngine(policy, str, [], max_rows=3).generate(prompts, 2, Sampling(9, 0.8, seed=3)):
        start = len(group.prompt.ids)
        for c in group.completions:
            logp = torch.log_softmax(policy.forward_logits([*group.prompt.ids, *c.ids]) / 0.8, -1)
            expected = [logp[start + i - 1, token].item() for i, token in enumerate(c.ids)]
            assert c.logprobs == pytest.approx(expected, abs=1e-9)
