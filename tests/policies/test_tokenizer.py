"""Text to ids and back: bytes, special tokens, several EOS, vocabularies that do not fit."""

import json

import pytest

from covey.policies import tiny
from covey.policies.locate import ModelError
from covey.policies.tokenizer import check_vocabulary, decode_completion, eos_ids, load_tokenizer


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_tokenizer(byte_folder):
    return load_tokenizer(byte_folder)


def sentencepiece_folder(folder):
    """A Llama-2-like tokenizer: words behind a lower bar, BOS in front, bytes as a fallback."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "4",
        "h",
        "i",
        "▁a",
        "▁4",
    ]
    merges = [("▁", "a"), ("▁", "4")]
    bpe = models.BPE({t: i for i, t in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True)
    core = Tokenizer(bpe)
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def test_every_byte_and_its_id_are_the_same(byte_tokenizer):
    text = "".join(chr(c) for c in range(0x250)) + "€ 🐦  \n\t\r\n"
    assert byte_tokenizer.encode(text) == list(text.encode())
    assert decode_completion(byte_tokenizer, list(text.encode()), ()) == text


def test_special_tokens_are_single_ids_and_leave_no_text(byte_tokenizer):
    assert [byte_tokenizer.convert_tokens_to_ids(t) for t in tiny.SPECIALS] == [256, 257, 258, 259]
    assert byte_tokenizer.encode("<|im_start|>a<|im_end|>") == [257, 97, 258]
    assert decode_completion(byte_tokenizer, [257, 97, 259, 98, 258, 256], (258, 256)) == "ab"
    assert byte_tokenizer.bos_token_id is None and byte_tokenizer.eos_token_id == 258


def test_chat_template_round_trip(byte_tokenizer):
    chat = [{"role": "user", "content": "2 + 2?"}]
    ids = byte_tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.decode(ids) == text
    assert byte_tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([258], ""),
        ([0xE2, 0x82], "�"),  # the start of a euro sign
        ([0xE2, 0x82, 0xAC], "€"),
        ([0x82, 0xAC, 0x41], "��A"),
        ([0x41, 260, 263, 0x42], "AB"),  # rows without a token
        ([ord(c) for c in " , ."], " , ."),  # nothing is tidied up
        ([0x41, 258, 0x42], "AB"),
    ],
)
def test_decoding_a_completion(byte_tokenizer, ids, text):
    assert decode_completion(byte_tokenizer, ids, (258,)) == text


def test_an_eos_that_is_an_ordinary_token_leaves_no_text(byte_tokenizer):
    assert decode_completion(byte_tokenizer, [97, 10], (10,)) == "a"


def test_the_space_in_front_of_the_first_word_stays(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path))
    prompt = tokenizer.encode("a")
    vocab = tokenizer.get_vocab()
    completion = [vocab[token] for token in ("▁4", "h", "i", "▁", "</s>")]
    assert prompt == [1, vocab["▁a"]]
    assert tokenizer.decode(completion[:-1]) == "4hi "  # which the decoder alone would drop
    assert decode_completion(tokenizer, completion, (2,)) == " 4hi "
    euro = [vocab[f"<0x{byte:02X}>"] for byte in "€".encode()]
    assert decode_completion(tokenizer, euro, (2,)) == "€"
    assert decode_completion(tokenizer, euro[:2], (2,)) == "��"


def test_tokenizer_json_is_obeyed_whatever_the_architecture(tmp_path):
    """AutoTokenizer would cut this Llama-like text with Qwen2's own rules, because of model_type."""
    sentencepiece_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a 4")) == ["<s>", "▁a", "▁4"]


def test_eos_ids_come_from_everywhere_once_and_in_order(byte_folder, byte_tokenizer, tmp_path):
    assert eos_ids(tmp_path, byte_tokenizer) == (258,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 256, "text_config": {"eos_token_id": [7, 256]}}')
    assert eos_ids(tmp_path, byte_tokenizer) == (256, 7, 258)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 9]}')
    assert eos_ids(tmp_path, byte_tokenizer) == (258, 9, 256, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert eos_ids(tmp_path, byte_tokenizer) == (256, 7, 258)


def test_no_eos_at_all_is_said(byte_tokenizer, tmp_path, caplog):
    class Nameless:
        eos_token_id = None

    assert eos_ids(tmp_path, Nameless()) == ()
    assert "every completion runs to max_new_tokens" in caplog.text


def test_vocabulary_must_fit_the_embedding():
    tokenizer = tiny.byte_tokenizer()
    check_vocabulary(tokenizer, 264)
    check_vocabulary(tokenizer, 260)
    with pytest.raises(ModelError, match=r"id 259 \('<\|pad\|>'\), but the embedding has 259 rows"):
        check_vocabulary(tokenizer, 259)
    tokenizer.add_tokens([f"<new{i}>" for i in range(6)])
    with pytest.raises(
        ModelError, match=r"id 265 \('<new5>'\), but the embedding has 264 rows \(ids 0\.\.263\)"
    ):
        check_vocabulary(tokenizer, 264)


def test_a_template_from_a_file_replaces_the_own_one(byte_folder, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load_tokenizer(byte_folder, str(file))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ü"}], tokenize=False) == "[ü]"


def test_template_errors(byte_folder, tmp_path):
    with pytest.raises(ModelError, match=r"model.chat_template: cannot read .*none\.jinja"):
        load_tokenizer(byte_folder, str(tmp_path / "none.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{{ m.content }}")
    with pytest.raises(ModelError, match=r"bad\.jinja: chat template, line 2: Unexpected end of template"):
        load_tokenizer(byte_folder, str(tmp_path / "bad.jinja"))
    (tmp_path / "picky.jinja").write_text("{{ raise_exception('system message first') }}")
    picky = load_tokenizer(byte_folder, str(tmp_path / "picky.jinja"))
    assert "system message first" in str(picky.chat_template)


def test_template_options_hold_for_every_rendering(byte_folder, tmp_path):
    """Qwen3's switch: without thinking the prompt already holds an empty block of it."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}A:"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    chat = [{"role": "user", "content": "x"}]

    def prompt(tokenizer, **more) -> str:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more)

    assert prompt(load_tokenizer(byte_folder, str(file))) == "[x]A:"
    tokenizer = load_tokenizer(byte_folder, str(file), {"enable_thinking": False})
    assert prompt(tokenizer) == "[x]A:<think></think>"
    assert prompt(tokenizer, enable_thinking=True) == "[x]A:"
    tokenizer.save_pretrained(tmp_path / "saved")
    assert prompt(load_tokenizer(tmp_path / "saved")) == "[x]A:"
    with pytest.raises(ModelError, match=r'template\.jinja does not read "enable_thought"'):
        load_tokenizer(byte_folder, str(file), {"enable_thought": False})


def test_a_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="the tokenizer does not load"):
        load_tokenizer(tmp_path)
