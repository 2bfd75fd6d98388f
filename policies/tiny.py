"""The model "tiny": a random two-layer Llama over bytes, made on the spot for tests and first tries.

It knows nothing, but it has all that a real model has (grouped-query attention, a chat template, an
end-of-turn token, unused embedding rows) and learns an easy reward within a minute on one core.
"""

from pathlib import Path

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")  # ids 256..259, after the 256 bytes
ROWS = 264  # embedding rows; 260..263 stand for no token, as in many real checkpoints
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Writes config, weights (float32, 0.4 MB) and tokenizer into `folder`, the same for the same seed."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    end_of_text, _, end_of_turn, pad = range(256, 256 + len(SPECIALS))
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        # An adapter leaves the head as it is, and the final norm bounds what the head gets: with the usual
        # 0.02 no logit could exceed about 64 * 0.02 = 1.3 and nothing could be learned. With 0.15 it is 10.
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=pad,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # Not model.save_pretrained, which shows a progress bar for what takes milliseconds.
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer():
    """A fast tokenizer whose id b is byte b; then come SPECIALS. EOS is <|im_end|>, and there is no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({name: byte for byte, name in enumerate(_byte_names())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _byte_names() -> list[str]:
    """GPT-2's name of each byte: printable Latin-1 stands for itself, the n-th other byte is chr(256 + n)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
