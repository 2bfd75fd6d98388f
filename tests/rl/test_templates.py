import pytest

from covey.rl.config import DataSection, SftDataSection
from covey.rl.data import DataError, load_rows
from covey.rl.documents import make_documents
from covey.rl.templates import check_context, make_prompts

BOS, EOS, START, END, THINK = 1, 2, 3, 4, 5
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = (  # the template of B10
    "<bos>{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def section(**keys) -> DataSection:
    return DataSection(train="unused", **keys)


def prompts(tokenizer, rows, **keys):
    return make_prompts(load_rows(rows, section(**keys)), tokenizer, section(**keys))


def chat(content: str) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


# ----------------------------------------------------------------------------------- exactly one BOS


def test_template_that_writes_bos_gets_no_second_one(word_tokenizer, word_id):
    (prompt,) = prompts(word_tokenizer(template=WITH_BOS), [chat("hi")])
    assert prompt.ids == (BOS, *map(word_id, ["U", ":", "hi", "A", ":"]))
    assert prompt.text == "<bos>U:hiA:"
    assert prompt.messages == ({"role": "user", "content": "hi"},)


def test_template_without_bos_gets_none(word_tokenizer, word_id):
    (prompt,) = prompts(word_tokenizer(template=CHATML), [chat("hi")])
    header = [START, word_id("assistant"), word_id("\n")]
    assert prompt.ids == (START, word_id("user"), word_id("\n"), word_id("hi"), END, word_id("\n"), *header)


def test_raw_text_gets_the_bos_that_its_tokenizer_adds(word_tokenizer, word_id):
    assert prompts(word_tokenizer(), [{"prompt": "hi"}])[0].ids == (BOS, word_id("hi"))
    assert prompts(word_tokenizer(add_bos=False), [{"prompt": "hi"}])[0].ids == (word_id("hi"),)


def test_raw_text_that_begins_with_bos_keeps_one_and_warns(word_tokenizer, word_id):
    found = prompts(word_tokenizer(), [{"prompt": "hi"}, {"prompt": "<bos>hi"}, {"prompt": "<bos>ok"}])
    assert [p.ids for p in found] == [(BOS, word_id("hi")), (BOS, word_id("hi")), (BOS, word_id("ok"))]
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("row 1: begins with the text of the tokenizer's BOS")
    assert "1 more row" in found.warnings[0]
    # Where the tokenizer adds none, the text's own BOS is what was asked for.
    own = prompts(word_tokenizer(add_bos=False), [{"prompt": "<bos>hi"}])
    assert own[0].ids == (BOS, word_id("hi")) and not own.warnings


@pytest.mark.parametrize("template", [WITH_BOS, CHATML])
def test_sft_documents_begin_with_the_ids_of_the_prompt(word_tokenizer, template):
    tokenizer = word_tokenizer(template=template)
    for row in (
        {"prompt": [{"role": "user", "content": "hi"}], "completion": "ok"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]},
        {"prompt": "hi", "completion": "ok"},
    ):
        keys = SftDataSection(train="unused")
        rows = load_rows([row], keys)
        (prompt,), (document,) = (
            make_prompts(rows, tokenizer, keys),
            make_documents(rows, tokenizer, keys, EOS),
        )
        assert document.ids[: len(prompt.ids)] == prompt.ids
        assert document.trained.index(True) == len(prompt.ids)
        assert document.ids.count(BOS) == (0 if template is CHATML and "<|im" in prompt.text else 1)


# --------------------------------------------------------------------------------------------- chat


def test_system_message_makes_a_chat(word_tokenizer):
    tokenizer = word_tokenizer(template=CHATML)
    (prompt,) = prompts(tokenizer, [{"question": "hi", "answer": 8}], system="add")
    assert prompt.text == (
        "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.columns == {"question": "hi", "answer": 8}
    assert prompts(tokenizer, [{"prompt": "hi"}], chat=True)[0].text.startswith("<|im_start|>user\nhi")
    assert prompts(tokenizer, [{"prompt": "hi"}])[0].text == "hi"


def test_a_rows_own_system_message_is_kept(word_tokenizer):
    row = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "hi"}]}
    found = prompts(word_tokenizer(template=CHATML), [row], system="b")
    assert [m["content"] for m in found[0].messages or ()] == ["a", "hi"]
    assert "own system message" in found.warnings[0]


def test_prompt_of_a_whole_conversation_ends_before_the_last_answer(word_tokenizer):
    turns = [("user", "hi"), ("assistant", "ok"), ("user", "sum"), ("assistant", "8")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (prompt,) = prompts(word_tokenizer(template=CHATML), [row])
    assert prompt.text.endswith("user\nsum<|im_end|>\n<|im_start|>assistant\n")


def test_chat_mistakes(word_tokenizer):
    with pytest.raises(DataError, match=r"no chat template. Set model\.chat_template.*data\.prompt"):
        prompts(word_tokenizer(), [chat("hi")])
    with pytest.raises(DataError, match=r"row 0: holds messages"):
        prompts(word_tokenizer(template=CHATML), [chat("hi")], chat=False)
    with pytest.raises(DataError, match=r"data\.system: raw prompts"):
        prompts(word_tokenizer(template=CHATML), [{"prompt": "hi"}], chat=False, system="a")
    refuses = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match=r"row 0: the chat template refuses.*no system role.*Roles: user"):
        prompts(word_tokenizer(template=refuses), [chat("hi")])


# ------------------------------------------------------------------------- too long, or nothing at all


def numbers(count: int) -> dict:
    return {"prompt": " ".join(f"w{i}" for i in range(count))}


def test_overlong_prompts(word_tokenizer, word_id):
    """B12: 3 and 8 tokens fit, 9, 12 and 500 do not; what is kept of a prompt are its last 8."""
    tokenizer = word_tokenizer(add_bos=False, skip_spaces=True)
    rows = [numbers(n) for n in (3, 8, 9, 12, 500)]
    with pytest.raises(
        DataError, match=r"row 2: the prompt has 9 tokens.*\(8\); so have 3 of 5.*longest 500"
    ):
        prompts(tokenizer, rows, max_prompt_tokens=8)

    kept = prompts(tokenizer, rows, max_prompt_tokens=8, overlong="drop")
    assert [p.row for p in kept] == [0, 1]
    assert (kept.dropped, kept.truncated, kept.longest) == (3, 0, 8)

    kept = prompts(tokenizer, rows, max_prompt_tokens=8, overlong="truncate")
    assert [len(p.ids) for p in kept] == [3, 8, 8, 8, 8]
    assert kept[3].ids == tuple(word_id(f"w{i}") for i in range(4, 12))
    assert (kept.dropped, kept.truncated, kept.longest) == (0, 3, 8)

    with pytest.raises(DataError, match=r"All 2 prompts are longer.*9 to 12 tokens"):
        prompts(tokenizer, [numbers(9), numbers(12)], max_prompt_tokens=8, overlong="drop")


def test_truncated_chat_prompts_keep_their_special_tokens(word_tokenizer, word_id):
    (prompt,) = prompts(
        word_tokenizer(template=CHATML), [chat("hi")], max_prompt_tokens=5, overlong="truncate"
    )
    assert prompt.ids == (END, word_id("\n"), START, word_id("assistant"), word_id("\n"))


@pytest.mark.parametrize("text", ["", "   "])
def test_empty_prompts(word_tokenizer, word_id, text):
    skip = {"skip_spaces": True}
    assert prompts(word_tokenizer(**skip), [{"prompt": text}])[0].ids == (BOS,)
    with pytest.raises(DataError, match=r"row 1: the text is empty"):
        prompts(word_tokenizer(add_bos=False, **skip), [{"prompt": "hi"}, {"prompt": text}])
    (prompt,) = prompts(word_tokenizer(template=CHATML), [chat(text)])
    assert prompt.ids[-3:] == (START, word_id("assistant"), word_id("\n"))


def test_context_is_checked_with_the_exact_boundary():
    check_context(8, 8, 16)
    check_context(8, 8, None)
    with pytest.raises(DataError, match=r"16 positions, the model has 15.*max_new_tokens to at most 7"):
        check_context(8, 8, 15)
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens below 8"):
        check_context(8, 8, 8)
