"""From rows with a prompt, a chosen and a rejected completion to pairs of documents, and what each mistake is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.rl.config import DpoDataSection, SftDataSection
from covey.rl.data import DataError, load_rows
from covey.rl.documents import Document, make_documents
from covey.rl.pairs import load_pairs, make_pairs
from covey.rl.tasks import preference_rows, task_rows

BOS, EOS, END = 1, 2, 4
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    + HEADER
)
QWEN3 = (  # an answer to the last question gets a think block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}" + HEADER
)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def pairs(tokenizer, rows, eos: int | list[int] = END, **keys: Any):
    section = DpoDataSection(train="unused", **keys)
    return make_pairs(load_pairs(rows, section), tokenizer, section, eos)


def sft(tokenizer, row: dict[str, Any], eos: int | list[int] = END, **keys: Any) -> Document:
    section = SftDataSection(train="unused", **keys)
    (document,) = make_documents(load_rows([row], section), tokenizer, section, eos)
    return document


# ------------------------------------------------------------------------------------ what rows can be


def test_plain_text_becomes_two_documents_with_the_same_start(word_tokenizer, word_id):
    row = {"prompt": "a", "chosen": "b hi", "rejected": "ok"}
    ((chosen, rejected),) = pairs(word_tokenizer(skip_spaces=True), [row], eos=EOS)
    assert chosen.ids == (BOS, word_id("a"), word_id("b"), word_id("hi"), EOS)
    assert rejected.ids == (BOS, word_id("a"), word_id("ok"), EOS)
    assert chosen.trained == (False, False, True, True, True)
    assert rejected.trained == (False, False, True, True)


def test_what_was_found_is_said() -> None:
    section = DpoDataSection(train="unused")
    sides = 'chosen from "chosen", rejected from "Rejected"'
    text = load_pairs([{"question": "a", "chosen": "b", "Rejected": "ok"}], section)
    assert text.found == f'1 rows given in Python: prompt from "question", {sides}'
    whole = load_pairs(
        [{"chosen": [user("a"), assistant("b")], "Rejected": [user("a"), assistant("8")]}], section
    )
    assert whole.found == f"1 rows given in Python: {sides}"


CONVERSATION = [user("hi"), assistant("ok"), user("sum")]
SAME_ROWS: dict[str, dict[str, Any]] = {
    "text after messages": {"prompt": CONVERSATION, "chosen": "8", "rejected": "a"},
    "messages after messages": {
        "prompt": CONVERSATION,
        "chosen": [assistant("8")],
        "rejected": [assistant("a")],
    },
    "conversations without a prompt": {
        "chosen": [*CONVERSATION, assistant("8")],
        "rejected": [*CONVERSATION, assistant("a")],
    },
    "conversations with the prompt once more": {
        "prompt": CONVERSATION,
        "chosen": [*CONVERSATION, assistant("8")],
        "rejected": [*CONVERSATION, assistant("a")],
    },
    "as in UltraFeedback, where the conversation wins": {
        "prompt": "b",
        "prompt_id": "77",
        "messages": [*CONVERSATION, assistant("8")],
        "chosen": [*CONVERSATION, assistant("8")],
        "rejected": [*CONVERSATION, assistant("a")],
        "score_chosen": 8.5,
    },
    "as in ShareGPT": {
        "prompt": [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "ok"},
            {"from": "human", "value": "sum"},
        ],
        "chosen": [{"from": "gpt", "value": "8"}],
        "rejected": [{"from": "gpt", "value": "a"}],
    },
}


@pytest.mark.parametrize("template", [CHATML, QWEN3], ids=["chatml", "qwen3"])
@pytest.mark.parametrize("shape", SAME_ROWS)
def test_each_side_is_the_document_that_sft_makes_of_it(word_tokenizer, shape, template):
    tokenizer = word_tokenizer(template=template)
    ((chosen, rejected),) = pairs(tokenizer, [SAME_ROWS[shape]])
    # A completion that is text is written as it stands, one in messages as the template writes it.
    text = shape.startswith("text")
    for document, answer in ((chosen, "8"), (rejected, "a")):
        row = {"prompt": CONVERSATION, "completion": answer if text else [assistant(answer)]}
        assert document == sft(tokenizer, row)
        trained = [i for i, t in zip(document.ids, document.trained, strict=True) if t]
        assert tokenizer.decode(trained).removeprefix("<think>\n\n</think>\n\n") == f"{answer}<|im_end|>"


def test_answers_of_the_prompt_are_not_trained_and_turns_after_it_are(word_tokenizer):
    """Conversations that part at the second answer: all that the assistant says from there on."""
    tokenizer = word_tokenizer(template=CHATML)
    start = [user("hi"), assistant("ok"), user("add")]
    row = {
        "chosen": [*start, assistant("8"), user("sum"), assistant("b")],
        "rejected": [*start, assistant("a")],
    }
    (pair,) = pairs(tokenizer, [row])
    said = [
        tokenizer.decode([i for i, t in zip(document.ids, document.trained, strict=True) if t])
        for document in pair
    ]
    assert said == ["8<|im_end|>b<|im_end|>", "a<|im_end|>"]


def test_columns_templates_and_the_system_message_come_from_the_configuration(word_tokenizer):
    tokenizer = word_tokenizer(template=CHATML)
    row = {"q": "hi", "good": "ok", "bad": "a", "solution": "8"}
    keys: dict[str, Any] = {"prompt": "add {q}", "chosen": "good", "rejected": "bad", "system": "sum"}
    section = DpoDataSection(train="unused", **keys)
    (preference,) = load_pairs([row], section)
    assert preference.chosen.columns == {**row, "answer": "8"}  # what a reward function can ask for
    ((chosen, rejected),) = make_pairs([preference], tokenizer, section, END)
    for document, answer in ((chosen, "ok"), (rejected, "a")):
        expected = {"prompt": [user("add hi")], "completion": answer}
        assert document == sft(tokenizer, expected, system="sum")


def test_a_file_with_names_in_capitals(word_tokenizer, tmp_path: Path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"Question": "a", "Chosen": "b", "Rejected": "hi"}) + "\n")
    ((chosen, _),) = pairs(word_tokenizer(), str(path), eos=EOS)
    assert chosen == sft(word_tokenizer(), {"prompt": "a", "completion": "b"}, eos=EOS)


def test_warnings_of_the_two_sides_are_not_said_twice(word_tokenizer):
    rows = [{"prompt": [user("hi")], "chosen": [assistant("ok")], "rejected": [assistant("a")]}]
    found = pairs(word_tokenizer(template=CHATML), rows, eos=EOS)
    assert len(found.warnings) == 1 and "ends a turn with <|im_end|>" in found.warnings[0]


# ---------------------------------------------------------------------------------------- what is refused


GOOD = {"prompt": "a", "chosen": "b", "rejected": "hi"}
TALK = {"chosen": [user("hi"), assistant("ok")], "rejected": [user("hi"), assistant("a")]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            r"No column is called rejected \(prompt, chosen\)\. Set data\.rejected",
        ),
        (
            {"prompt": "a", "rejected": "b"},
            r"No column is called chosen \(prompt, rejected\)\. Set data\.chosen",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            r"No column is left for the prompt \(chosen, rejected\).*conversations",
        ),
        (
            {"chosen": "a", "rejected": "b", "id": "c"},
            r"No column looks like a prompt \(id\)\. Set data\.prompt",
        ),
        ({**GOOD, "rejected": None}, r'row 0: "rejected" is None, not text'),
        ({**GOOD, "chosen": 7}, r'row 0: "chosen" is 7, not text. Set'),
        ({**GOOD, "prompt": 7}, r'row 0: "prompt" is 7, not text'),
        ({**GOOD, "chosen": []}, r'row 0: "chosen" is \[\]'),
        ({**GOOD, "rejected": " \n"}, r'row 0 "rejected" is empty; 1 of 1 pairs.*Correct or remove them\.$'),
        ({**GOOD, "rejected": "b"}, r"row 0: both completions are the same; 1 of 1 pairs are empty or equal"),
        ({**TALK, "rejected": TALK["chosen"]}, r"row 0: both completions are the same"),
        ({**TALK, "chosen": [user("hi"), assistant("")]}, r'row 0 "chosen" is empty'),
        (
            {**TALK, "chosen": [user("hi"), user("ok")]},
            r'row 0 "chosen": no assistant message, so nothing to learn',
        ),
        ({**TALK, "chosen": [{"role": "user"}]}, r'row 0: "chosen", message 0 has no text in "content"'),
        ({**TALK, "chosen": "ok"}, r'row 0: of "chosen" and "rejected" one is a whole conversation'),
        ({**TALK, "chosen": [user("ok"), assistant("a")]}, r"row 0: .* do not begin with the same message"),
        ({**TALK, "prompt": [user("sum")]}, r'row 0: .* do not begin with the messages of "prompt"'),
        (
            {**GOOD, "prompt": [user("hi"), assistant("ok")]},
            r'row 0: "prompt" ends with an assistant message',
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named_with_its_column(word_tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        pairs(word_tokenizer(template=CHATML), [row])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"chosen": "choosen"}, r'data\.chosen: no column "choosen".*Did you mean "chosen"\?'),
        ({"rejected": "reject"}, r'data\.rejected: no column "reject".*Did you mean "rejected"\?'),
        ({"prompt": "promt"}, r'data\.prompt: no column "promt".*Did you mean "prompt"\?'),
        ({"task": {"digits": 2}}, r"data\.task: data\.train is not a task"),
    ],
)
def test_a_wrong_name_in_the_configuration(word_tokenizer, keys, message):
    with pytest.raises(DataError, match=message):
        pairs(word_tokenizer(), [GOOD], **keys)


def test_no_rows_and_a_row_of_a_file_are_named(word_tokenizer, tmp_path: Path):
    with pytest.raises(DataError, match=r"data\.train: the data set has no rows"):
        pairs(word_tokenizer(), [])
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "chosen": ""}) + "\n")
    with pytest.raises(
        DataError, match=r'pairs\.jsonl:2 "chosen" is empty; 1 of 2.*or set data\.unusable: drop\.'
    ):
        pairs(word_tokenizer(), str(path))


def test_pairs_without_a_preference_can_be_dropped_and_are_counted(word_tokenizer):
    rows = [GOOD, {**GOOD, "chosen": "hi"}, {**GOOD, "chosen": ""}, {**GOOD, "prompt": "ok"}]
    found = pairs(word_tokenizer(), rows, eos=EOS, unusable="drop")
    assert [pair.chosen.row for pair in found] == [0, 3] == [pair.rejected.row for pair in found]
    assert found.dropped == 0  # of those that are too long
    assert found.warnings == [
        "2 of 4 pairs were dropped, because a completion is empty or both are the same; "
        "the first: row 1: both completions are the same"
    ]
    with pytest.raises(DataError, match=r"2 of 2 pairs are empty or equal. Correct or remove them\.$"):
        pairs(word_tokenizer(), rows[1:3], eos=EOS, unusable="drop")


def test_overlong_pairs(word_tokenizer):
    tokenizer = word_tokenizer(add_bos=False, skip_spaces=True)

    def row(
        prompt: int, chosen: int, rejected: int
    ) -> dict[str, str]:  # each with one more token for the end
        return {
            "prompt": " ".join(["a"] * prompt),
            "chosen": " ".join(["b"] * chosen),
            "rejected": " ".join(["hi"] * rejected),
        }

    rows = [row(2, 5, 1), row(2, 6, 1), row(2, 1, 9), row(8, 1, 1)]
    with pytest.raises(DataError, match=r"row 1: has 9 tokens.*\(8\); so have 3 of 4 pairs, the longest 12"):
        pairs(tokenizer, rows, eos=EOS, max_tokens=8)
    kept = pairs(tokenizer, rows, eos=EOS, max_tokens=8, overlong="drop")
    assert [pair.chosen.row for pair in kept] == [0] and (kept.dropped, kept.truncated, kept.longest) == (
        3,
        0,
        8,
    )
    kept = pairs(tokenizer, rows, eos=EOS, max_tokens=8, overlong="truncate")
    assert [(p.chosen.row, sum(p.chosen.trained), sum(p.rejected.trained)) for p in kept] == [
        (0, 6, 2),
        (1, 6, 2),
        (2, 2, 6),
    ]
    assert (kept.dropped, kept.truncated) == (1, 2)  # row 3 has nothing of its completions among its first 8
    alike = {"prompt": "a", "chosen": "b b b hi", "rejected": "b b b ok"}  # differ behind the cut
    kept = pairs(tokenizer, [rows[0], alike], eos=EOS, max_tokens=4, overlong="truncate")
    assert [pair.chosen.row for pair in kept] == [0] and (kept.dropped, kept.truncated) == (1, 1)
    with pytest.raises(DataError, match=r"All 1 pairs are longer.*\(8\).*10 to 10 tokens"):
        pairs(tokenizer, [rows[3]], eos=EOS, max_tokens=8, overlong="drop")


# ---------------------------------------------------------------------------------------------- the task


@pytest.mark.parametrize("args", [{}, {"style": "chat"}, {"seed": 3}], ids=str)
@pytest.mark.parametrize("name", ["addition", "gcd"])
def test_a_task_prefers_the_right_answer_to_a_wrong_one(name, args):
    rows = preference_rows(name, {"rows": 50, **args})
    assert rows == preference_rows(name, {"rows": 50, **args})
    for row, plain in zip(rows, task_rows(name, {"rows": 50, **args}), strict=True):
        right, wrong = int(row["chosen"]), int(row["rejected"])
        assert row["chosen"] == plain["completion"] and right == int(row["answer"])
        assert 0 <= wrong != right and abs(wrong - right) <= 10
        assert row["rejected"] == plain["completion"].replace(str(right), str(wrong))
        assert row["prompt"] == plain["prompt"] and "completion" not in row
    gaps = {int(row["rejected"]) - int(row["chosen"]) for row in rows}
    assert len(gaps) > 8


def test_the_pairs_of_a_task(word_tokenizer):
    section = DpoDataSection(train="task:addition", task={"rows": 5})
    train = load_pairs("task:addition", section)
    held_out = load_pairs("task:addition", section, held_out=True)
    assert len(train) == 5 and train[0].where == "task:addition row 0"
    assert not {p.chosen.prompt for p in train} & {p.chosen.prompt for p in held_out}
    with pytest.raises(DataError, match="task:additoin: no such task"):
        load_pairs("task:additoin", section)
