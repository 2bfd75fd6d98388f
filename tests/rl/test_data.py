import functools
import json
from itertools import chain
from typing import Any

import pytest

from covey.rl.config import DataSection, SftDataSection
from covey.rl.data import Cursor, DataError, load_rows
from covey.rl.sources import open_stream

SECTION = DataSection(train="unused")
SFT = SftDataSection(train="unused")


def grpo(**keys):
    return DataSection(train="unused", **keys)


def sft(**keys):
    return SftDataSection(train="unused", **keys)


# ------------------------------------------------------------------------------------------------- files


def test_jsonl_keeps_types_and_skips_bom_crlf_and_blank_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [
        '{"prompt": "p\\u2028q", "answer": 7, "id": "007"}',
        "",
        '{"prompt": "r", "answer": 0.5, "id": null}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    first, second = load_rows(str(path), SECTION)
    assert first.columns == {"prompt": "p\u2028q", "answer": 7, "id": "007"}
    assert type(first.columns["answer"]) is int
    assert second.columns == {"prompt": "r", "answer": 0.5, "id": None}
    assert (first.index, second.index) == (0, 1)
    assert second.where == f"{path}:3"


def test_raw_line_separator_inside_json_text_does_not_split_the_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "p\u2028q\u0085r"}\n', encoding="utf-8")
    assert [row.prompt for row in load_rows(str(path), SECTION)] == ["p\u2028q\u0085r"]


def test_csv_values_are_text_and_may_hold_commas_line_breaks_and_much(tmp_path):
    path = tmp_path / "train.csv"
    long = "x" * 200_000  # more than csv's default limit of 131072
    path.write_bytes(f'\ufeffquestion,answer\r\n"a, ""b""\r\nc",007\r\n\r\n{long},1e5\r\n'.encode())
    first, second = load_rows(str(path), SECTION)
    assert first.columns == {"question": 'a, "b"\r\nc', "answer": "007"}
    assert second.columns == {"question": long, "answer": "1e5"}


def test_json_parquet_and_datasets_give_the_same_columns(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "p", "answer": 7}, {"prompt": "q", "answer": 8}]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    for source in (tmp_path / "t.json", str(tmp_path / "t.parquet"), datasets.Dataset.from_list(rows), rows):
        assert [row.columns for row in load_rows(source, SECTION)] == rows


def test_tables_are_rows():
    """Whatever the index of a data frame says; what is missing is null."""
    import pandas
    import pyarrow

    rows = [{"prompt": "p", "answer": 7, "more": None}, {"prompt": "q", "answer": 8, "more": "x"}]
    frame = pandas.DataFrame(rows, index=[5, 3])
    for source in (frame, pyarrow.Table.from_pylist(rows)):
        assert [row.columns for row in load_rows(source, SECTION)] == rows
        _, read = open_stream(source, "data")
        streamed: list[Any] = [*read(), *read()]
        assert [dict(row) for _, row in streamed] == [*rows, *rows]
    with pytest.raises(
        DataError, match=r"a pandas.DataFrame with a column that Arrow cannot .*a list of dicts"
    ):
        load_rows(pandas.DataFrame({"prompt": ["p", 3]}), SECTION)
    with pytest.raises(DataError, match="has no rows"):
        load_rows(frame[:0], SECTION)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", b'{"prompt": "p"}\n\n{"prompt": }\n', r"t\.jsonl:3: not valid JSON"),
        ("t.jsonl", b'{"prompt": "p"}\n["q"]\n', r"t\.jsonl:2: a row is a JSON object.*a list"),
        ("t.jsonl", b'{"prompt": "p"}\n{"prompt": "\xff"}\n', r"t\.jsonl:2: not UTF-8"),
        ("t.json", b'[{"prompt": "p"}\n{"prompt": "q"}]\n', r"t\.json:2: not valid JSON"),
        ("t.csv", b"prompt,answer\na,1\nb,2,3\n", r"t\.csv:3: 3 fields, but the header has 2"),
        ("t.csv", b"prompt,prompt\na,1\n", r't\.csv:1: the column "prompt" stands twice'),
        ("t.parquet", b"no parquet", r"t\.parquet: not a readable Parquet"),
        ("t.doc", b"prompt", r'"[^"]*t\.doc" has no known ending. Use one of \.jsonl'),
        ("t.jsonl", b"\n \n", r"data\.train: .*t\.jsonl has no rows"),
    ],
)
def test_broken_files_name_place_and_problem(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        load_rows(str(path), SECTION)


def test_missing_file_and_folder_suggest_what_is_there(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(
        DataError, match=r'data\.train: no file .*trian\.jsonl".* Did you mean "train\.jsonl"\?'
    ):
        load_rows(str(tmp_path / "trian.jsonl"), SECTION)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.eval: .* is a folder without a data file"):
        load_rows(str(tmp_path / "empty"), SECTION, held_out=True)
    with pytest.raises(DataError, match="does not exist"):
        load_rows(str(tmp_path / "nowhere" / "x.csv"), SECTION)
    assert issubclass(DataError, ValueError)


def test_hub_ids(monkeypatch):
    import datasets

    asked = []

    def load(name, config=None, split=None):
        asked.append((name, config, split))
        splits = {part: datasets.Dataset.from_list([{"prompt": part}]) for part in ("train", "test")}
        return splits["test"] if split else datasets.DatasetDict(**splits)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_rows("openai/gsm8k:main", SECTION)[0].prompt == "train"
    assert load_rows("openai/gsm8k:main", SECTION, held_out=True)[0].prompt == "test"
    assert load_rows("gsm8k::test[:10]", SECTION)[0].prompt == "test"
    assert asked == [("openai/gsm8k", "main", None)] * 2 + [("gsm8k", None, "test[:10]")]


def test_csv_files_of_the_hub_keep_their_values_as_text(tmp_path, monkeypatch):
    import datasets

    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "train.csv").write_text("prompt,completion,n\n007,NA,\n1e5,None,3\n")
    rows = [{"prompt": "007", "completion": "NA", "n": ""}, {"prompt": "1e5", "completion": "None", "n": "3"}]
    load = functools.partial(datasets.load_dataset, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *more, **how: load(str(hub), *more, **how))
    assert load(str(hub), split="train")[0]["prompt"] == 7  # what the loader would make of it
    for source in ("me/sums", "me/sums::train"):
        assert [row.columns for row in load_rows(source, SECTION)] == rows
    _, read = open_stream("me/sums", "data.train")
    assert [raw[1] for raw in read() if isinstance(raw, tuple)] == rows


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionError("Couldn't reach 'x' on the Hub (OfflineModeIsEnabled)"), "cannot reach the hub"),
        (RuntimeError("Dataset 'x' is a gated dataset on the Hub"), "hf auth login"),
        (FileNotFoundError("Dataset 'x' doesn't exist on the Hub"), "no data set"),
        (ValueError("Config name is missing. Please pick one among: a, b"), "pick one among: a, b"),
    ],
)
def test_hub_problems_are_one_sentence(monkeypatch, error, says):
    import datasets

    def load(*args, **keys):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=says):
        load_rows("someone/x", SECTION)


def test_splits_and_streams_are_refused():
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "p"}])
    with pytest.raises(DataError, match="has the splits train"):
        load_rows(datasets.DatasetDict(**{"train": rows}), SECTION)
    with pytest.raises(DataError, match="no length"):
        load_rows(rows.to_iterable_dataset(), SECTION)
    with pytest.raises(DataError, match="row 1: a row is a mapping"):
        load_rows([{"prompt": "p"}, "q"], SECTION)


# ------------------------------------------------------------------------------------------------ columns


def test_columns_are_found_by_name():
    row = load_rows([{"Question": "q", "solution": "s", "level": 3}], SECTION)[0]
    assert row.prompt == "q"
    assert row.columns == {"Question": "q", "solution": "s", "level": 3, "answer": "s"}
    # The exact name wins over others that could be meant.
    row = load_rows([{"problem": "x", "prompt": "p", "solution": "s", "answer": 1}], SECTION)[0]
    assert (row.prompt, row.columns["answer"]) == ("p", 1)


def test_explicit_columns_and_templates_win():
    rows = [{"prompt": "p", "question": "q", "x": 3, "y": "z"}]
    assert load_rows(rows, grpo(prompt="question"))[0].prompt == "q"
    template = "Q: {question} {x}\nIn \\boxed{}, {{y}}, \\boxed{{{y}}}:"
    assert load_rows(rows, grpo(prompt=template))[0].prompt == "Q: q 3\nIn \\boxed{}, {y}, \\boxed{z}:"
    assert load_rows(rows, grpo(answer="x"))[0].columns["answer"] == 3


def test_answer_after_keeps_what_follows_the_last_mark():
    rows = [{"question": "q", "answer": "6 #### 7\n#### 72 \n"}]
    assert load_rows(rows, grpo(answer_after="####"))[0].columns["answer"] == "72"
    with pytest.raises(DataError, match='row 0: no "@" in "answer"'):
        load_rows(rows, grpo(answer_after="@"))
    with pytest.raises(DataError, match=r"data\.answer_after needs text"):
        load_rows([{"question": "q", "answer": 72}], grpo(answer_after="####"))
    with pytest.raises(DataError, match=r"data\.answer_after: no column looks like an answer"):
        load_rows([{"question": "q"}], grpo(answer_after="####"))


@pytest.mark.parametrize(
    ("row", "section", "says"),
    [
        (
            {"question": "q"},
            grpo(prompt="qestion"),
            r'data\.prompt: no column "qestion".*Did you mean "question"',
        ),
        (
            {"question": "q"},
            grpo(prompt="{questoin}"),
            r'no column "questoin".*question.*Did you mean "question"',
        ),
        ({"question": "q"}, grpo(answer="label"), r'data\.answer: no column "label". Columns: question'),
        ({"foo": "q"}, SECTION, r"No column looks like a prompt \(foo\).*data\.prompt"),
        ({"instruction": "q", "input": "r"}, SECTION, r"instruction and input.*\{instruction\}\\n\{input\}"),
        ({"prompt": "q", "messages": []}, SECTION, r"Both prompt and messages.*Set data\.prompt"),
        ({"prompt": "q", "label": 1, "target": 2}, SECTION, r"data\.answer: label and target"),
        ({"prompt": "q"}, SFT, r"text to learn after prompt.*data\.completion"),
        (
            {"prompt": "q", "answer": 7},
            SFT,
            r'row 0: "answer" is 7, not text\. Set data\.completion: "\{answer\}"',
        ),
        ({"prompt": 7}, SECTION, r'row 0: "prompt" is 7, not text\. Set data\.prompt: "\{prompt\}"'),
        ({"prompt": None}, SECTION, r'row 0: "prompt" is None, not text\. Correct or remove'),
        ({"prompt": []}, SECTION, r'row 0: "prompt" is \[\]'),
        ({"messages": "hi"}, SECTION, r"row 0: \"messages\" is 'hi'"),
        ({"messages": [{"content": "x"}]}, SECTION, r'message 0 has no "role"'),
        ({"messages": [{"role": "user"}]}, SECTION, r'message 0 has no text in "content"'),
        ({"prompt": "p"}, grpo(prompt="prompt", messages="prompt"), r"both are set"),
        ({"prompt": "p"}, grpo(task={"digits": 2}), r"data\.task: data\.train is not a task"),
    ],
)
def test_column_problems_say_what_to_do(row, section, says):
    with pytest.raises(DataError, match=says):
        load_rows([row], section)


def test_a_row_that_lacks_a_column_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "p"}\n{"promt": "q"}\n')
    with pytest.raises(DataError, match=r't\.jsonl:2: "prompt" is None'):
        load_rows(str(path), SECTION)


def test_conversations():
    user, bot = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    sharegpt = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
    assert load_rows([{"conversations": sharegpt}], SECTION)[0].messages == (user, bot)
    with_none = [{**user, "tool_calls": None}, bot]  # what Arrow makes of uneven messages
    assert load_rows([{"messages": with_none}], SECTION)[0].messages == (user, bot)

    row = load_rows([{"prompt": [user], "completion": "a"}], SFT)[0]  # TRL's conversational prompts
    assert (row.messages, row.prompt_messages, row.completion) == ((user,), 1, "a")
    row = load_rows([{"prompt": [user], "completion": [bot]}], SFT)[0]
    assert (row.messages, row.prompt_messages, row.completion) == ((user, bot), 1, None)
    with pytest.raises(DataError, match="ends with an assistant message"):
        load_rows([{"prompt": [user, bot]}], SECTION)


def test_what_sft_learns():
    assert load_rows([{"prompt": "p", "completion": "c", "answer": "a"}], SFT)[0].completion == "c"
    assert load_rows([{"question": "p", "answer": "work #### 7"}], sft(answer_after="####"))[
        0
    ].completion == ("work #### 7")
    assert load_rows([{"prompt": "p", "answer": 7}], sft(completion=" {answer}"))[0].completion == " 7"
    assert load_rows([{"text": "t"}], SFT)[0].text == "t"
    row = load_rows([{"content": "t"}], sft(completion="content"))[0]
    assert (row.text, row.prompt, row.completion) == ("t", None, None)


# -------------------------------------------------------------------------------------------------- order


def test_short_last_step_of_an_epoch():
    cursor = Cursor(10, 4, seed=0, shuffle=True, wrap=False)
    steps = [cursor.next() for _ in range(6)]
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    assert cursor.steps(1) == 3 and cursor.steps(2) == 6 and cursor.steps(0.5) == 2
    for epoch in (steps[:3], steps[3:]):
        assert sorted(chain(*epoch)) == list(range(10))
    assert steps[:3] != steps[3:]


def test_wrapping_steps_are_full_and_hold_no_row_twice():
    for seed in range(50):
        cursor = Cursor(10, 4, seed=seed, shuffle=True)
        steps = [cursor.next() for _ in range(10)]  # 40 rows: 4 epochs
        assert all(len(set(step)) == 4 for step in steps)
        flat = list(chain(*steps))
        assert [sorted(flat[k : k + 10]) for k in range(0, 40, 10)] == [list(range(10))] * 4
    assert cursor.steps(1) == 3 and cursor.steps(2) == 5


def test_fewer_rows_than_a_step_needs_are_repeated():
    cursor = Cursor(3, 4, seed=0, shuffle=True)
    flat = cursor.next() + cursor.next() + cursor.next()
    assert [sorted(flat[k : k + 3]) for k in range(0, 12, 3)] == [[0, 1, 2]] * 4


def test_without_shuffling_rows_come_in_order():
    cursor = Cursor(5, 2, seed=0, shuffle=False)
    assert [cursor.next() for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]


@pytest.mark.parametrize(
    "rows, batch, wrap", [(10, 4, True), (10, 4, False), (3, 4, True), (4, 4, True), (7, 3, True)]
)
def test_resume_goes_on_exactly(rows, batch, wrap):
    for done in range(12):
        cursor = Cursor(rows, batch, seed=5, shuffle=True, wrap=wrap)
        for _ in range(done):
            cursor.next()
        again = Cursor(rows, batch, seed=5, shuffle=True, wrap=wrap)
        again.restore(json.loads(json.dumps(cursor.state())))
        assert [again.next() for _ in range(9)] == [cursor.next() for _ in range(9)]


def test_resume_with_other_data_is_refused():
    state = Cursor(10, 4, seed=0, shuffle=True).state()
    with pytest.raises(DataError, match="rows = 10, the data has 12"):
        Cursor(12, 4, seed=0, shuffle=True).restore(state)


def test_order_depends_on_the_seed_only():
    def first(seed: int) -> list[int]:
        return Cursor(100, 100, seed=seed, shuffle=True).next()

    assert first(1) == first(1)
    assert first(1) != first(2)
