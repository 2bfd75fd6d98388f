"""Files as rows: JSON lines, JSON, Parquet, CSV, TSV and plain text, each but Parquet also as .gz.

A reader yields rows, and in place of a row that it cannot read a `DataError`, so that the caller can leave it out. What
makes the rest of a file unreadable is raised. Texts are UTF-8, or what a byte order mark says.
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

Raw = tuple[str, Mapping[str, Any]]  # where a row stands ("train.jsonl:3"), and its columns


class DataError(ValueError):
    """Something is wrong with the data or its description: one sentence, then what to do."""


Rows = Iterator[Raw | DataError]


class ArrowRow(dict[str, Any]):
    """A row of a Parquet file or a data set: its nested objects have every key that any of them has, else null."""


def kind_of(value: Any) -> str:
    """A value in words."""
    names = {str: "text", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(
        type(value), f"a number ({value})" if isinstance(value, int | float) else str(type(value))
    )


# ------------------------------------------------------------------------------------------------- lines

BOMS = (  # the longer ones first: that of UTF-32 begins like that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
PIECES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def _lines(path: Path) -> Iterable[str]:
    """The lines with their ends (\\n, \\r\\n or \\r). Goes on after the DataError of a line that is not UTF-8."""
    with _opened(path) as file:
        start = file.read(4)
    encoding = next((name for bom, name in BOMS if start.startswith(bom)), None)
    if encoding is None:
        return starmap(partial(_decoded, path), enumerate(_byte_lines(path), 1))
    with _opened(path) as file:
        whole = file.read()
    try:
        text = whole.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: begins with the mark of {encoding.upper()}, but byte {error.start} is not "
            f"{encoding.upper()}. Save the file as UTF-8."
        ) from None
    return (
        piece.decode("utf-8", "surrogatepass")
        for piece in PIECES.findall(text.encode("utf-8", "surrogatepass"))
    )


def _decoded(path: Path, number: int, line: bytes) -> str:
    if b"\0" in line:
        raise DataError(
            f"{path}:{number}: holds NUL bytes, as UTF-16 without a byte order mark does. Save the file as UTF-8."
        )
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: not UTF-8 text (byte 0x{line[error.start]:02x} at place {error.start + 1} of the line). "
            "Save the file as UTF-8."
        ) from None


def _byte_lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        for line in file:
            yield from PIECES.findall(line)


class _Counted:
    """Counts the lines as they are taken, those that raise included."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines, self.number = iter(lines), 0

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> str:
        self.number += 1
        return next(self.lines)


class _opened:
    """A file open for reading bytes, unpacked if its name ends with .gz. Raises DataError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        try:
            packed = self.path.suffix.lower() == ".gz"
            self.file = gzip.open(self.path, "rb") if packed else self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}).") from None
        return self.file

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.file.close()
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            raise DataError(f"{self.path}: not a whole gzip file ({error}). Pack the file again.") from None


# ------------------------------------------------------------------------------------------------- kinds


def _json_row(value: Any, where: str) -> Raw | DataError:
    if isinstance(value, dict):
        return where, value
    return DataError(f'{where}: a row is a JSON object like {{"prompt": "..."}}, this is {kind_of(value)}.')


def _parsed(text: str) -> Any:
    """Raises ValueError, also for escapes (\\ud800) that are half a character."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("an escape like \\ud800 is half a character") from None
    return value


def _read_jsonl(path: Path) -> Rows:
    lines = iter(_lines(path))
    number = 0
    while True:
        number += 1
        where = f"{path}:{number}"
        try:
            line = next(lines)
            if line.strip():
                yield _json_row(_parsed(line), where)
        except StopIteration:
            return
        except DataError as error:
            yield error
        except json.JSONDecodeError as error:
            yield DataError(
                f"{where}: not valid JSON ({error.msg}, column {error.colno}). "
                "Each line holds one whole JSON object; correct or remove this line."
            )
        except ValueError as error:
            yield DataError(f"{where}: not usable JSON ({error}). Correct or remove this line.")


def _read_json(path: Path) -> Rows:
    """A list of objects, {"data": [...]}, or, as many .json files are, one object per line."""
    text = "".join(_lines(path))
    try:
        value = _parsed(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(path)
            return
        raise DataError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). Correct it.") from None
    except ValueError as error:
        raise DataError(f"{path}: not usable JSON ({error}). Correct it.") from None
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(
            f"{path}: expected a list of objects, found {kind_of(value)}. "
            'Write [{...}, {...}] or {"data": [...]}.'
        )
    for number, row in enumerate(value):
        yield _json_row(row, f"{path} row {number}")


def _read_csv(path: Path) -> Rows:
    """With a header. TSV, and CSV whose header has no comma, may be separated by tabs or semicolons."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a prompt may be longer than csv's default of 128 KiB
    first = next((line for line in _lines(path) if line.strip()), "")
    separators = "\t" if ending(path).startswith(".tsv") else ",;\t"
    lines = _Counted(_lines(path))
    delimiter = next((s for s in separators if s in first), separators[0])
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    header: list[str] | None = None
    while True:
        number = lines.number + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except DataError as error:  # a line that is not UTF-8
            if header is None:
                raise
            yield error
            continue
        except csv.Error as error:
            problem = DataError(f"{path}:{number}: not valid CSV ({error}). Correct this line.")
            if header is None or "end of data" in str(error):  # an open quote has taken the rest of the file
                raise problem from None
            yield problem
            continue
        if not fields:
            continue
        if header is None:
            header = _header(fields, path)
        else:
            yield _csv_row(fields, header, f"{path}:{number}")


def _header(names: list[str], path: Path) -> list[str]:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f'{path}:1: the column "{twice}" stands twice. Rename one of them.')
    return names


def _csv_row(fields: list[str], header: list[str], where: str) -> Raw | DataError:
    if len(fields) == len(header):
        return where, dict(zip(header, fields, strict=True))
    return DataError(
        f"{where}: {len(fields)} fields, but the header has {len(header)} ({', '.join(header)}). "
        'Put fields that hold commas or line breaks in "quotes".'
    )


def _read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path} row {number}", ArrowRow(row)
                number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a readable Parquet file ({reason}). Write the file again.") from None


def read_text_lines(path: Path) -> Rows:
    """One row {"text": ...} per line; blank ones are left out."""
    lines = iter(_lines(path))
    number = 0
    while True:
        number += 1
        try:
            line = next(lines)
        except StopIteration:
            return
        except DataError as error:
            yield error
            continue
        if line.strip():
            yield f"{path}:{number}", {"text": line.rstrip("\r\n")}


def read_text_whole(path: Path) -> Rows:
    """One row {"text": ...} for the file, its line ends as \\n; none if it is blank."""
    try:
        text = "".join(_lines(path))
    except DataError as error:
        yield error
        return
    if text.strip():
        yield str(path), {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": read_text_lines,
}


def ending(path: Path) -> str:
    """The ending that says the kind (".jsonl" also for "a.JSONL.gz"); "" if it is none that can be read."""
    name = path.name.lower()
    packed = name.endswith(".gz")
    found = Path(name.removesuffix(".gz")).suffix
    return found if found in READERS and not (packed and found == ".parquet") else ""
