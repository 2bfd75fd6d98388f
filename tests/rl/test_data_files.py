"""Every form of data: a table of small files with the rows, or the whole sentence, that each must give."""

import gzip
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from covey.rl.config import DataSection, SftConfig, SftDataSection
from covey.rl.config_file import ConfigError, dump_config, load_config
from covey.rl.data import DataError, load_rows
from covey.rl.data_config import SourceSection
from covey.rl.sources import read_source

P = {"prompt": "é", "n": 7}
LINE = '{"prompt": "é", "n": 7}'
PQ = [{"a": "p", "b": "007"}, {"a": "q", "b": "1e-5"}]
JSON_HINT = "Each line holds one whole JSON object; correct or remove this line."


def parquet(rows: Sequence[Mapping[str, object]]) -> bytes:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(map(dict, rows))), file := io.BytesIO())
    return file.getvalue()


# name, bytes, the columns of the rows
READ = [
    ("lf.jsonl", f"{LINE}\n{LINE}\n".encode(), [P, P]),
    ("crlf.jsonl", f"{LINE}\r\n{LINE}\r\n".encode(), [P, P]),
    ("cr.jsonl", f"{LINE}\r{LINE}\r".encode(), [P, P]),
    ("no_end.jsonl", f"{LINE}\n{LINE}".encode(), [P, P]),
    ("blank.jsonl", f"\n{LINE}\n \n".encode(), [P]),
    ("bom.jsonl", f"{LINE}\n".encode("utf-8-sig"), [P]),
    ("utf16le.jsonl", b"\xff\xfe" + f"{LINE}\r\n{LINE}".encode("utf-16-le"), [P, P]),
    ("utf16be.jsonl", b"\xfe\xff" + f"{LINE}\n".encode("utf-16-be"), [P]),
    ("utf32.jsonl", f"{LINE}\n".encode("utf-32"), [P]),
    ("a.ndjson", LINE.encode(), [P]),
    ("UPPER.JSONL", LINE.encode(), [P]),
    ("packed.jsonl.gz", gzip.compress(LINE.encode()), [P]),
    (
        "values.jsonl",
        b'{"a": "007", "b": 1e-5, "c": 123456789012345678901234567890, "d": null, "e": [[1], {"f": []}]}',
        [{"a": "007", "b": 1e-5, "c": 123456789012345678901234567890, "d": None, "e": [[1], {"f": []}]}],
    ),
    ("pair.jsonl", b'{"a": "\\ud83d\\ude00"}', [{"a": "\U0001f600"}]),
    ("list.json", f"[{LINE},\n{LINE}]".encode(), [P, P]),
    ("data.json", f'{{"version": 1, "data": [{LINE}]}}'.encode(), [P]),
    ("lines.json", f"{LINE}\n{LINE}\n".encode(), [P, P]),
    ("bom.json", f"[{LINE}]".encode("utf-16"), [P]),
    ("packed.json.gz", gzip.compress(f"[{LINE}]".encode()), [P]),
    ("a.csv", b"a,b\np,007\nq,1e-5\n", PQ),
    ("crlf.csv", b"a,b\r\np,007\r\nq,1e-5\r\n", PQ),
    ("cr.csv", b"a,b\rp,007\rq,1e-5\r", PQ),
    ("bom.csv", b"\xef\xbb\xbfa,b\np,007\nq,1e-5", PQ),
    ("utf16.csv", "a,b\np,007\nq,1e-5".encode("utf-16"), PQ),
    ("semicolon.csv", b"a;b\np;007\nq;1e-5\n", PQ),
    ("tab.csv", b"a\tb\np\t007\nq\t1e-5\n", PQ),
    ("a.tsv", b"a\tb\np\t007\nq\t1e-5\n", PQ),
    ("comma.tsv", b"a,b\tc\n1,2\t3\n", [{"a,b": "1,2", "c": "3"}]),
    ("quoted.csv", b'a,b\n"x, ""y""\r\nz",\n', [{"a": 'x, "y"\r\nz', "b": ""}]),
    ("packed.csv.gz", gzip.compress(b"a,b\np,007\nq,1e-5\n"), PQ),
    ("a.txt", b" one \r\n\r\ntwo\rthree", [{"text": " one "}, {"text": "two"}, {"text": "three"}]),
    ("a.parquet", parquet([P, P | {"n": None}]), [P, P | {"n": None}]),
    ("nested.parquet", parquet([{"a": "007", "b": [{"c": 1e-5}]}]), [{"a": "007", "b": [{"c": 1e-5}]}]),
    ("packed.txt.gz", gzip.compress(b"one\ntwo"), [{"text": "one"}, {"text": "two"}]),
]

# name, bytes, the sentence without the file's path in front, and how many rows are left with data.malformed: skip
BROKEN = [
    (
        "torn.jsonl",
        b'{"a": 1}\n{"a": \n{"a": 2}',
        f":2: not valid JSON (Expecting value, column 1). {JSON_HINT}",
        2,
    ),
    ("two.jsonl", b'{"a": 1} {"a": 2}', f":1: not valid JSON (Extra data, column 10). {JSON_HINT}", 0),
    ("list.jsonl", b'{"a": 1}\n[2]', ':2: a row is a JSON object like {"prompt": "..."}, this is a list.', 1),
    (
        "latin.jsonl",
        b'{"a": 1}\n{"a": "caf\xe9"}\n{"a": 2}\n',
        ":2: not UTF-8 text (byte 0xe9 at place 11 of the line). Save the file as UTF-8.",
        2,
    ),
    (
        "half.jsonl",
        b'{"a": "\\ud800"}\n{"a": 1}',
        ":1: not usable JSON (an escape like \\ud800 is half a character). Correct or remove this line.",
        1,
    ),
    (
        "odd.jsonl",
        b"\xff\xfe{\x00}",
        ": begins with the mark of UTF-16, but byte 4 is not UTF-16. Save the file as UTF-8.",
        None,
    ),
    (
        "row.json",
        b'[{"a": 1}, 2]',
        ' row 1: a row is a JSON object like {"prompt": "..."}, this is a number (2).',
        1,
    ),
    ("torn.json", b'[{"a": 1},\n', ":2: not valid JSON (Expecting value). Correct it.", None),
    (
        "object.json",
        b'{"a": [1]}',
        ': expected a list of objects, found an object. Write [{...}, {...}] or {"data": [...]}.',
        None,
    ),
    (
        "more.csv",
        b'a,b\n"1\n2",3\n4,5,6\n7,8\n',
        ':4: 3 fields, but the header has 2 (a, b). Put fields that hold commas or line breaks in "quotes".',
        2,
    ),
    (
        "quote.csv",
        b'a,b\n"1"x,2\n3,4\n',
        ":2: not valid CSV (',' expected after '\"'). Correct this line.",
        1,
    ),
    (
        "open.csv",
        b'a,b\n1,2\n"3,4\n5,6\n',
        ":3: not valid CSV (unexpected end of data). Correct this line.",
        None,
    ),
    ("twice.csv", b"a,a\n1,2\n", ':1: the column "a" stands twice. Rename one of them.', None),
    (
        "latin.csv",
        b"a\n\xe9\n1,2\n3\n",
        ":2: not UTF-8 text (byte 0xe9 at place 1 of the line). Save the file as UTF-8.",
        1,
    ),
    (
        "latin.txt",
        b"one\n\xe9\ntwo",
        ":2: not UTF-8 text (byte 0xe9 at place 1 of the line). Save the file as UTF-8.",
        2,
    ),
    (
        "utf16_unmarked.txt",
        "one\ntwo".encode("utf-16-le"),
        ":1: holds NUL bytes, as UTF-16 without a byte order mark does. Save the file as UTF-8.",
        0,
    ),
    (
        "nul.csv",
        b"a\n\x00\n3\n",
        ":2: holds NUL bytes, as UTF-16 without a byte order mark does. Save the file as UTF-8.",
        1,
    ),
    (
        "torn.parquet",
        parquet([P])[:-9],
        ": not a readable Parquet file (Parquet magic bytes not found in footer. Either "
        "the file is corrupted or this is not a parquet file.). Write the file again.",
        None,
    ),
    (
        "plain.jsonl.gz",
        b"{}",
        ": not a whole gzip file (Not a gzipped file (b'{}')). Pack the file again.",
        None,
    ),
]


@pytest.mark.parametrize(("name", "content", "rows"), READ, ids=[case[0] for case in READ])
def test_files_that_can_be_read(
    tmp_path: Path, name: str, content: bytes, rows: list[dict[str, object]]
) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_source(str(tmp_path / name), "data.train", False)
    assert [row for _, row in found.rows] == rows
    assert repr([row for _, row in found.rows]) == repr(rows)  # 7 is not 7.0


@pytest.mark.parametrize(("name", "content", "says", "left"), BROKEN, ids=[case[0] for case in BROKEN])
def test_files_that_cannot(tmp_path: Path, name: str, content: bytes, says: str, left: int | None) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_source(str(path), "data.train", False)
    assert str(error.value) == f"{path}{says}"
    if left is None:
        with pytest.raises(DataError):
            read_source(str(path), "data.train", False, skip=True)
    else:
        assert len(read_source(str(path), "data.train", False, skip=True).rows) == left


# Shapes: a row, and what becomes of prompt, messages (role: content), completion and text in SFT.
USER, BOT = ("user", "u"), ("assistant", "a")
SHAPES = [
    (
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
        None,
        [USER, BOT],
        None,
    ),
    (
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        None,
        [USER, BOT],
        None,
    ),
    (
        {"conversations": [{"from": "User", "value": "u"}, {"from": "chatgpt", "value": "a"}]},
        None,
        [USER, BOT],
        None,
    ),
    (
        {
            "conversations": [
                {"from": r, "value": "x"} for r in ("system", "human", "model", "observation", "function")
            ]
        },
        None,
        [(r, "x") for r in ("system", "user", "assistant", "tool", "tool")],
        None,
    ),
    ({"messages": [{"role": "developer", "content": "u"}]}, None, [("developer", "u")], None),
    ({"prompt": "p", "completion": "c"}, "p", None, "c"),
    ({"instruction": "p", "output": "c"}, "p", None, "c"),
    ({"question": "p", "answer": "c"}, "p", None, "c"),
    ({"query": "p", "response": "c"}, "p", None, "c"),
    ({"input": "p", "target": "c"}, "p", None, "c"),
    ({"instruction": "p", "input": "i", "output": "c", "text": "all"}, "p\n\ni", None, "c"),
    ({"instruction": "p", "input": "", "output": "c"}, "p", None, "c"),
]


@pytest.mark.parametrize(("row", "prompt", "messages", "completion"), SHAPES)
def test_shapes(row, prompt, messages, completion) -> None:
    (found,) = load_rows([row], SftDataSection(train="unused"))
    said = found.messages and [(m["role"], m["content"]) for m in found.messages]
    assert (found.prompt, said, found.completion) == (prompt, messages, completion)


def test_what_was_found_is_said(tmp_path: Path) -> None:
    alpaca = {"instruction": "p", "input": "i", "output": "c"}
    assert load_rows([alpaca], SftDataSection(train="unused")).found == (
        '1 rows given in Python: prompt from "instruction", input from "input", text to learn from "output"'
    )
    explicit = SftDataSection(train="unused", prompt="input", completion="output")
    assert load_rows([alpaca], explicit)[0].prompt == "i"
    both = {"prompt": "p", "completion": "c", "messages": []}
    with pytest.raises(DataError) as error:
        load_rows([both], SftDataSection(train="unused"))
    assert str(error.value) == (
        "Both prompt and messages could be the prompt (columns: prompt, completion, messages). "
        "Set data.prompt: prompt, or data.messages: messages"
    )


def test_skipped_rows_are_counted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p"}\n{"prompt": null}\n{\n')
    with caplog.at_level(logging.WARNING):
        rows = load_rows(str(path), DataSection(train="unused", malformed="skip"))
    assert [(row.index, row.prompt) for row in rows] == [(0, "p")]
    assert caplog.messages[0].startswith(
        f"data.train: 2 of 3 rows are malformed and were skipped; the first: {path}:3: "
    )


def test_folders_and_globs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\r\n\r\n{name}")
    (tmp_path / "README.md").write_text("no data")
    texts = [{"text": "a\n\na"}, {"text": "b\n\nb"}]
    for source in (str(tmp_path), str(tmp_path / "*.txt")):
        assert [row for _, row in read_source(source, "data.train", False).rows] == texts
    (tmp_path / "c.jsonl").write_text(LINE)
    for source, says in (
        (
            tmp_path,
            f'"{tmp_path}" holds files of the kinds .jsonl, .txt. Choose one with a pattern, such as ',
        ),
        (tmp_path / "*.csv", f'no file matches "{tmp_path}/*.csv".'),
        (tmp_path / "*", f'"{tmp_path}/*" matches "{tmp_path}/README.md", which has no known ending. '),
    ):
        with pytest.raises(DataError) as error:
            read_source(str(source), "data.train", False)
        assert str(error.value).startswith(f"data.train: {says}")


def test_saved_data_sets(tmp_path: Path) -> None:
    import datasets

    part = datasets.Dataset.from_list([P])
    part.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=part, test=part).save_to_disk(str(tmp_path / "two"))  # type: ignore[call-arg]
    for name in ("one", "two"):
        assert [row for _, row in read_source(str(tmp_path / name), "data.train", False).rows] == [P]


def test_weights_repeat_and_choose_rows(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{k}\n" for k in range(10)))

    def texts(a: float, b: float, seed: int = 0) -> list[str]:
        both = [SourceSection(path=str(tmp_path / f"{n}.txt"), weight=w) for n, w in (("a", a), ("b", b))]
        return [str(row["text"]) for _, row in read_source(both, "data.train", False, seed=seed).rows]

    mixed = texts(2.5, 0.3)
    counts = [mixed.count(f"a{k}") for k in range(10)]
    assert sorted(counts) == [2] * 5 + [3] * 5
    assert len(mixed) == 28 and len(set(mixed[25:])) == 3 and mixed == sorted(mixed)
    assert mixed == texts(2.5, 0.3) and mixed != texts(2.5, 0.3, seed=1)
    assert texts(1, 1) == [f"{n}{k}" for n in "ab" for k in range(10)]
    source = [SourceSection(path=str(tmp_path / "a.txt"), weight=2.5)]
    assert read_source(source, "data.train", False).name == f"{tmp_path}/a.txt (25 of 10 x 2.5)"


def test_sources_in_a_recipe() -> None:
    rest = {"model": {"path": "tiny"}, "optim": {"steps": 1}}
    given = [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]
    config = load_config({**rest, "data": {"train": given}}, [], SftConfig)
    assert str(config.data.train) == "[a.jsonl x 2, b.jsonl]"
    assert "weight: 2.0" in dump_config(config) and load_config(config, [], SftConfig) == config
    for bad, says in (
        ([], "the list of sources is empty; write [{path: a.jsonl}, {path: b.jsonl, weight: 2}]"),
        ([{"paht": "a"}], "source 0 has no path; write {path: a.jsonl, weight: 2}"),
        ([{"path": "a", "wieght": 2}], 'source 0 has the unknown key "wieght"; a source has path and weight'),
        ([{"path": "a", "weight": 0}], "source 0 has the weight 0; it must be a number above 0"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config({**rest, "data": {"train": bad}}, [], SftConfig)
        assert str(error.value).endswith(says)
