import pytest

from covey.rl.config import SftDataSection
from covey.rl.data import DataError, load_rows
from covey.rl.documents import make_documents

BOS, EOS, START, END, THINK, UNTHINK, PAD = 1, 2, 3, 4, 5, 6, 7
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    + HEADER
)
CHATML_MARKED = (  # says what the assistant wrote, including the line break behind the end of the turn
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}" + HEADER
)
# Like Qwen3: reasoning stays in the answer to the last question only, which always gets a think block.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
    "{% if m.role == 'assistant' %}{% set r = '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{% set c = '<think>\n' ~ r ~ '\n</think>\n\n' ~ c %}{% endif %}"
    "{{ c }}{% else %}{{ c }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}" + HEADER
)
# Like R1's distils: reasoning is cut out of every turn, and the generation prompt opens it.
R1 = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}"
    "{% else %}A:{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:<think>\n{% endif %}"
)
R1_CLOSED = R1.replace("A:<think>\n", "A:")
NO_END = (
    "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
REASONED = "<think>\nadd\n</think>\n\n8"


def documents(tokenizer, rows, eos: int | list[int] = END, **keys):
    section = SftDataSection(train="unused", **keys)
    return make_documents(load_rows(rows, section), tokenizer, section, eos)


def conversation(*contents: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def trained_text(tokenizer, document) -> str:
    return tokenizer.decode([i for i, t in zip(document.ids, document.trained, strict=True) if t])


# ------------------------------------------------------------------------------ prompt and completion


@pytest.mark.parametrize("pad", ["<eos>", "<pad>"])
def test_end_of_sequence_is_trained_whatever_the_padding(word_tokenizer, word_id, pad):
    # B07 in numbers: prompt [a], completion [b, hi, eos] has 3 trained tokens.
    tokenizer = word_tokenizer(add_bos=False, skip_spaces=True, pad=pad)
    (document,) = documents(tokenizer, [{"prompt": "a", "completion": "b hi"}], eos=EOS)
    assert document.ids == (word_id("a"), word_id("b"), word_id("hi"), EOS)
    assert document.trained == (False, True, True, True)


def test_end_of_sequence_inside_a_prompt_is_not_trained_and_not_doubled_at_the_end(word_tokenizer, word_id):
    tokenizer = word_tokenizer(skip_spaces=True)
    (document,) = documents(tokenizer, [{"prompt": "a<eos>b", "completion": "hi<eos>"}], eos=EOS)
    assert document.ids == (BOS, word_id("a"), EOS, word_id("b"), word_id("hi"), EOS)
    assert document.trained == (False,) * 4 + (True,) * 2


def test_loss_on_all_leaves_out_the_first_token_only(word_tokenizer):
    row = {"prompt": "a", "completion": "b"}
    (document,) = documents(word_tokenizer(), [row], eos=EOS, loss_on="all")
    assert document.trained == (False, True, True, True)  # bos, a, b, eos
    (document,) = documents(word_tokenizer(template=CHATML), [conversation("hi", "ok")], loss_on="all")
    assert document.trained == (False,) + (True,) * (len(document.ids) - 1)


def test_text_is_trained_as_a_whole(word_tokenizer, word_id):
    (document,) = documents(word_tokenizer(skip_spaces=True), [{"text": "a b"}], eos=[EOS, END])
    assert document.ids == (BOS, word_id("a"), word_id("b"), EOS)
    assert document.trained == (False, True, True, True)
    with pytest.raises(DataError, match=r"data\.loss_on: assistant needs a prompt"):
        documents(word_tokenizer(), [{"text": "a"}], loss_on="assistant")


def test_a_space_that_the_tokenizer_puts_in_front_of_texts_is_not_learnt():
    # Like SentencePiece: the text "a 8" is [_a, _8], but "8" and " 8" alone are [_8] and [_, _8].
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<eos>", "▁a", "▁8", "▁", "8"]
    raw = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>")
    (document,) = documents(tokenizer, [{"prompt": "a", "completion": " 8"}], eos=1)
    assert document.ids == (2, 3, 1)
    assert document.trained == (False, True, True)


def test_nothing_to_train_is_an_error_that_names_the_row(word_tokenizer):
    with pytest.raises(DataError, match=r"row 1: no token of it would be trained"):
        documents(word_tokenizer(add_bos=False), [{"text": "a"}, {"text": "<eos>"}], eos=EOS)
    user = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(DataError, match=r"row 1: no assistant message"):
        documents(word_tokenizer(template=CHATML), [conversation("hi", "ok"), user])
    answer = {"messages": [{"role": "assistant", "content": "ok"}]}
    with pytest.raises(DataError, match=r"row 0: begins with the assistant"):
        documents(word_tokenizer(template=CHATML), [answer])


def test_overlong_documents(word_tokenizer):
    tokenizer = word_tokenizer(add_bos=False, skip_spaces=True)

    def row(prompt: int, completion: int) -> dict:  # one more token for the end of sequence
        return {"prompt": " ".join(["a"] * prompt), "completion": " ".join(["b"] * completion)}

    rows = [row(2, 5), row(2, 6), row(8, 1), row(7, 9)]
    with pytest.raises(DataError, match=r"row 1: has 9 tokens.*\(8\); so have 3 of 4 rows, the longest 17"):
        documents(tokenizer, rows, eos=EOS, max_tokens=8)
    kept = documents(tokenizer, rows, eos=EOS, max_tokens=8, overlong="drop")
    assert [d.row for d in kept] == [0]
    assert (kept.dropped, kept.truncated, kept.longest) == (3, 0, 8)
    kept = documents(tokenizer, rows, eos=EOS, max_tokens=8, overlong="truncate")
    assert [(d.row, len(d.ids), sum(d.trained)) for d in kept] == [(0, 8, 6), (1, 8, 6), (3, 8, 1)]
    assert (kept.dropped, kept.truncated) == (1, 2)  # row 2 has no trained token among its first 8
    with pytest.raises(DataError, match=r"All 1 rows are longer.*10 to 10"):
        documents(tokenizer, [row(8, 1)], eos=EOS, max_tokens=8, overlong="drop")


# ---------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_answer_and_end_of_turn_are_trained_and_nothing_else(word_tokenizer, word_id, template):
    """B11: whether the template marks the turns or not; header and the line break behind the end are not trained."""
    tokenizer = word_tokenizer(template=template)
    (document,) = documents(tokenizer, [conversation("hi", "ok")])
    line, user, assistant = word_id("\n"), word_id("user"), word_id("assistant")
    assert document.ids == (
        *(START, user, line, word_id("hi"), END, line),
        *(START, assistant, line, word_id("ok"), END),
    )
    assert document.trained == (False,) * 9 + (True, True)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_every_assistant_turn_is_trained(word_tokenizer, template):
    tokenizer = word_tokenizer(template=template)
    row = conversation("hi", "ok", "sum", "8")
    (document,) = documents(tokenizer, [row])
    assert trained_text(tokenizer, document) == "ok<|im_end|>8<|im_end|>"
    assert sum(document.trained) == 4
    (document,) = documents(tokenizer, [row], loss_on="completion")
    assert trained_text(tokenizer, document) == "8<|im_end|>"
    # A question without an answer at the end adds nothing.
    (longer,) = documents(tokenizer, [conversation("hi", "ok", "sum", "8", "add")], loss_on="completion")
    assert longer == document


def test_answers_of_the_prompt_are_trained_only_if_asked_for(word_tokenizer):
    tokenizer = word_tokenizer(template=CHATML)
    turns = conversation("hi", "ok", "sum", "8")["messages"]
    for row in (
        {"prompt": turns[:3], "completion": "8"},
        {"prompt": turns[:3], "completion": turns[3:]},
    ):
        assert trained_text(tokenizer, documents(tokenizer, [row])[0]) == "8<|im_end|>"
        (document,) = documents(tokenizer, [row], loss_on="assistant")
        assert trained_text(tokenizer, document) == "ok<|im_end|>8<|im_end|>"


def test_template_without_end_of_turn_gets_the_end_of_sequence(word_tokenizer):
    tokenizer = word_tokenizer(template=NO_END)
    (document,) = documents(tokenizer, [conversation("hi", "ok")], eos=EOS)
    assert tokenizer.decode(document.ids) == "U:hi\nA:ok<eos>"
    assert trained_text(tokenizer, document) == "ok<eos>"


def test_end_of_turn_that_ends_no_completion_is_a_warning(word_tokenizer):
    found = documents(word_tokenizer(template=CHATML), [conversation("hi", "ok")], eos=EOS)
    assert len(found.warnings) == 1 and "ends a turn with <|im_end|>" in found.warnings[0]
    assert not documents(word_tokenizer(template=CHATML), [conversation("hi", "ok")], eos=[EOS, END]).warnings


# -------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, END), (CHATML_MARKED, END), (QWEN3, END), (R1_CLOSED, EOS)]
)
@pytest.mark.parametrize("shape", ["messages", "completion"])
def test_reasoning_survives_every_template(word_tokenizer, template, end, shape):
    """B11: also where the template cuts it."""
    tokenizer = word_tokenizer(template=template)
    row = conversation("sum", REASONED)
    if shape == "completion":
        row = {"prompt": row["messages"][:1], "completion": REASONED}
    (document,) = documents(tokenizer, [row], eos=end)
    assert trained_text(tokenizer, document) == REASONED + tokenizer.decode([end])
    assert document.ids[-1] == end and document.ids.count(THINK) == document.ids.count(UNTHINK) == 1


@pytest.mark.parametrize("content", [REASONED, "add\n</think>\n\n8"])
@pytest.mark.parametrize("shape", ["messages", "completion"])
def test_reasoning_that_the_prompt_opens_is_not_opened_twice(word_tokenizer, content, shape):
    """B11: the ids are those of the prompt and the answer, with one <think> and one </think>."""
    tokenizer = word_tokenizer(template=R1)
    row = conversation("sum", content)
    if shape == "completion":
        row = {"prompt": row["messages"][:1], "completion": content}
    (document,) = documents(tokenizer, [row], eos=EOS)
    assert tokenizer.decode(document.ids) == "<bos>U:sumA:<think>\nadd\n</think>\n\n8<eos>"
    assert trained_text(tokenizer, document) == "add\n</think>\n\n8<eos>"


def test_an_answer_that_leaves_the_prompts_reasoning_open_is_refused(word_tokenizer):
    with pytest.raises(DataError, match=r"row 0: the chat template opens <think>.*never closes it"):
        documents(word_tokenizer(template=R1), [conversation("sum", "8")], eos=EOS)


def test_rewritten_answers_are_announced(word_tokenizer):
    found = documents(word_tokenizer(template=R1), [conversation("sum", REASONED)] * 3, eos=EOS)
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("row 0: has an answer that the chat template would change")
    assert "2 more rows" in found.warnings[0]


def test_template_that_cuts_reasoning_out_of_earlier_turns_trains_the_last_one(word_tokenizer):
    tokenizer = word_tokenizer(template=QWEN3)
    row = conversation("sum", "<think>\na\n</think>\n\nok", "sum", REASONED)
    found = documents(tokenizer, [row])
    assert trained_text(tokenizer, found[0]) == REASONED + "<|im_end|>"
    assert "a" not in [tokenizer.decode([i]) for i in found[0].ids]  # as the sampler would see it
    assert any("only the last turn is trained" in warning for warning in found.warnings)
    # A template that keeps it trains both.
    tokenizer = word_tokenizer(template=CHATML)
    (document,) = documents(tokenizer, [row])
    assert (
        trained_text(tokenizer, document) == "<think>\na\n</think>\n\nok<|im_end|>" + REASONED + "<|im_end|>"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_beside_the_content_is_written_by_the_template_or_missed(word_tokenizer, key):
    row = conversation("sum", "8")
    row["messages"][1][key] = "add"
    writes = QWEN3.replace("{% set r = '' %}", "{% set r = m." + key + " %}")
    tokenizer = word_tokenizer(template=writes)
    assert trained_text(tokenizer, documents(tokenizer, [row])[0]) == REASONED + "<|im_end|>"
    with pytest.raises(DataError, match=rf"row 0: the chat template leaves out a part .*{key}\)"):
        documents(word_tokenizer(template=CHATML), [row])


def test_earlier_turns_without_reasoning_are_trained_where_the_last_gets_an_empty_block(word_tokenizer):
    tokenizer = word_tokenizer(template=QWEN3)
    found = documents(tokenizer, [conversation("hi", "ok", "sum", "8")])
    assert trained_text(tokenizer, found[0]) == "ok<|im_end|><think>\n\n</think>\n\n8<|im_end|>"
    assert not found.warnings


# ---------------------------------------------------------------------------- policies for odd rows


def test_a_split_text_trains_every_token_once(word_tokenizer, word_id):
    tokenizer = word_tokenizer(skip_spaces=True)
    words = [f"w{i}" for i in range(11)]
    whole = (BOS, *map(word_id, words), EOS)  # 13 ids, of which 12 are targets
    found = documents(
        tokenizer, [{"text": "a"}, {"text": " ".join(words)}], eos=EOS, max_tokens=5, overlong="split"
    )
    assert [d.row for d in found] == [0, 1, 1, 1]
    pieces = found[1:]
    assert [len(d.ids) for d in pieces] == [5, 5, 5]
    targets = [i for d in pieces for i, t in zip(d.ids, d.trained, strict=True) if t]
    assert targets == list(whole[1:])
    assert [d.ids[0] for d in pieces] == [whole[0], whole[4], whole[8]]  # what the first target follows
    assert (found.split, found.truncated, found.dropped, found.rows, found.longest) == (1, 0, 0, 2, 5)
    assert found.warnings == ["1 of 2 rows are longer than data.max_tokens and were split."]


@pytest.mark.parametrize("length", range(1, 12))
def test_no_piece_of_a_split_is_empty(word_tokenizer, length):
    found = documents(
        word_tokenizer(skip_spaces=True), [{"text": "a " * length}], eos=EOS, max_tokens=3, overlong="split"
    )
    assert sum(sum(d.trained) for d in found) == length + 1
    assert all(2 <= len(d.ids) <= 3 and any(d.trained) for d in found)


def test_only_plain_texts_are_split(word_tokenizer):
    rows = [{"prompt": "a", "completion": "b b b b"}]
    with pytest.raises(DataError, match=r"row 0: has .* only plain texts can be split"):
        documents(word_tokenizer(), rows, eos=EOS, max_tokens=4, overlong="split")
    with pytest.raises(DataError, match="only plain texts can be split"):
        documents(word_tokenizer(template=CHATML), [conversation("hi", "ok")], max_tokens=4, overlong="split")


def test_rows_with_nothing_to_train_are_dropped_and_counted_if_wanted(word_tokenizer):
    tokenizer = word_tokenizer(template=CHATML)
    user = {"messages": [{"role": "user", "content": "hi"}]}
    found = documents(tokenizer, [user, conversation("hi", "ok"), user], untrained="drop")
    assert ([d.row for d in found], found.untrained, found.dropped) == ([1], 2, 0)
    assert found.warnings == ["row 0: nothing of it is trained; 2 of 3 rows were dropped for that."]
    texts = [{"text": "<eos>"}, {"text": "a"}]
    assert documents(word_tokenizer(add_bos=False), texts, eos=EOS, untrained="drop").untrained == 1
    with pytest.raises(DataError, match="Nothing is left of 2 rows: 0 are longer"):
        documents(tokenizer, [user, user], untrained="drop")


def test_loss_on_last_trains_the_last_assistant_turn_only(word_tokenizer):
    tokenizer = word_tokenizer(template=CHATML)
    turns = conversation("hi", "ok", "sum", "8")["messages"]
    for row in (
        {"messages": turns},
        {"prompt": turns[:1], "completion": turns[1:]},
        {"prompt": turns[:3], "completion": "8"},
    ):
        (document,) = documents(tokenizer, [row], loss_on="last")
        assert trained_text(tokenizer, document) == "8<|im_end|>"
    with pytest.raises(DataError, match=r"data\.loss_on: last needs a prompt"):
        documents(word_tokenizer(), [{"text": "a"}], loss_on="last")


def test_reasoning_that_the_template_cuts_is_said_once_and_truly(word_tokenizer):
    tokenizer = word_tokenizer(template=QWEN3)
    row = conversation("sum", "<think>\na\n</think>\n\nok", "sum", REASONED)
    for loss_on, said in (("auto", "only the last turn is trained"), ("all", "as the template writes them")):
        (warning,) = documents(tokenizer, [row] * 3, loss_on=loss_on).warnings
        assert "row 0: has reasoning (<think> ... </think>) in assistant turns before the last" in warning
        assert said in warning and "2 more rows" in warning
    assert not documents(tokenizer, [row], loss_on="last").warnings  # a sampler would see the same
