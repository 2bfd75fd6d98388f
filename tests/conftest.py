"""What every test shares: an offline CPU environment, deselected GPU tests, and checkpoints made on the spot.

`table_lm` is a model whose every log-prob is known exactly. The `tiny_*` folders are random models of real
architectures whose logits, norms, biases and RoPE are all far from trivial values.
"""

import gc
import os
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when a kernel is defined, so before any import of them
    torch.set_num_threads(min(2, torch.get_num_threads()))

SPECIALS = ("<|end|>", "<|pad|>", "<|unk|>")  # ids 0, 1, 2; <|end|> is EOS
LETTERS = "\n " + string.digits + string.ascii_lowercase + "+-*/=.,:;?!()<>#_|'\"UA"  # 61 of them: ids 3..63
CHARACTERS = LETTERS + "".join(c for c in string.printable[:95] if c not in LETTERS)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ ('A:' if m.role == 'assistant' else 'U:') + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _fixed_random_state() -> Iterator[None]:
    """Each test starts from the same global generator, whichever tests ran before it."""
    torch.manual_seed(0)
    yield


@pytest.fixture
def drop_graph() -> Iterator[Callable[[], None]]:
    """During a capture, drop_graph() makes a CUDA graph garbage, for which Python then looks at every new object."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(8, device="cuda")
    held = [graph]
    del graph

    def drop() -> None:
        if held and torch.cuda.is_current_stream_capturing():
            cycle: list[Any] = [held.pop()]
            cycle.append(cycle)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield drop
    gc.set_threshold(*before)
    assert gc.isenabled()
    assert not held, "nothing was captured"


def write_character_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of `size` entries with one token per character: ids 0..2 are SPECIALS, then CHARACTERS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_names = {" ": "Ġ", "\n": "Ċ"}  # how ByteLevel writes them; the other characters stand for themselves
    entries = [*SPECIALS, *(byte_names.get(c, c) for c in CHARACTERS)][:size]
    assert len(entries) == size, f"at most {len(SPECIALS) + len(CHARACTERS)} entries"
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    # BPE without merges, because AutoTokenizer gives any Qwen2 folder Qwen2's own pre-tokenizer and decoder.
    core = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    end, pad, unk = SPECIALS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        pad_token=pad,
        unk_token=unk,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def write_table_lm(table: Any, folder: str | os.PathLike[str]) -> Path:
    """Writes a one-layer Qwen2 checkpoint whose logits after token t are exactly table[t], for any context.

    table: [64, 64] or [64] (the same row after every token), float32.
    The layer adds nothing (o_proj = down_proj = 0) and the embedding is the identity, so the final RMSNorm
    (weight 1, eps below the float32 resolution of 1/64) turns token t into 8 e_t, and lm_head[v, t] is
    table[t, v] / 8.
    """
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    size = 64
    table = torch.as_tensor(table, dtype=torch.float32).expand(size, size)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rms_norm_eps=1e-12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return 0.05 * torch.randn(*shape, generator=generator)

    layer = {
        "input_layernorm.weight": torch.ones(size),
        "post_attention_layernorm.weight": torch.ones(size),
        "self_attn.q_proj.weight": random(size, size),
        "self_attn.q_proj.bias": random(size),
        "self_attn.k_proj.weight": random(size // 2, size),
        "self_attn.k_proj.bias": random(size // 2),
        "self_attn.v_proj.weight": random(size // 2, size),
        "self_attn.v_proj.bias": random(size // 2),
        "self_attn.o_proj.weight": torch.zeros(size, size),
        "mlp.gate_proj.weight": random(size, size),
        "mlp.up_proj.weight": random(size, size),
        "mlp.down_proj.weight": torch.zeros(size, size),
    }
    weights = {f"model.layers.0.{name}": weight for name, weight in layer.items()}
    weights["model.embed_tokens.weight"] = torch.eye(size)
    weights["model.norm.weight"] = torch.ones(size)
    weights["lm_head.weight"] = (table.T / 8).contiguous()

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_character_tokenizer(folder, size)
    return folder


def write_random_model(config: Any, folder: Path, seed: int = 0) -> Path:
    """Writes a random float32 checkpoint of `config` with norms spread around 1 and biases around 0."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.copy_(1 + 0.2 * torch.randn_like(weight))
                elif name.endswith("bias"):
                    weight.copy_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder)
    write_character_tokenizer(folder, config.vocab_size)
    return folder


def _tiny_sizes(**changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "dtype": "float32",
    }
    return sizes | changes


@pytest.fixture(scope="session")
def table_lm() -> Callable[..., Path]:
    """table_lm(R, path) writes the checkpoint of `write_table_lm` and returns its folder."""
    return write_table_lm


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama: untied head, grouped-query attention, default RoPE, vocabulary 96."""
    from transformers import LlamaConfig

    config = LlamaConfig(**_tiny_sizes(tie_word_embeddings=False))
    return write_random_model(config, tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def tiny_llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llama with llama3 RoPE scaling: of 4 frequencies one is kept, one blended, two divided by 8."""
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = LlamaConfig(**_tiny_sizes(tie_word_embeddings=False, rope_parameters=rope))
    return write_random_model(config, tmp_path_factory.mktemp("tiny_llama3"))


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Qwen2: tied head, non-zero attention biases, vocabulary 96."""
    from transformers import Qwen2Config

    config = Qwen2Config(**_tiny_sizes(tie_word_embeddings=True))
    return write_random_model(config, tmp_path_factory.mktemp("tiny_qwen2"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """random_model("gpt2", n_layer=3) is the folder of a random float32 model of that type, made once per session."""
    from transformers import AutoConfig

    made: dict[str, Path] = {}

    def make(model_type: str, **changes: Any) -> Path:
        key = f"{model_type} {sorted(changes.items())}"
        if key not in made:
            config = AutoConfig.for_model(model_type, **_tiny_sizes(**changes))
            made[key] = write_random_model(config, tmp_path_factory.mktemp(model_type))
        return made[key]

    return make
