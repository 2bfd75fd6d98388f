"""Where rows come from: files, the Hugging Face hub, data set objects and Python lists.

Values arrive as they were written: "007" stays text and 7 stays a number, because a reward may compare them.
"""

import csv
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Raw = tuple[str, Mapping[str, Any]]  # where a row stands ("train.jsonl:3"), and its columns


class DataError(ValueError):
    """Something is wrong with the data or its description: one sentence, then what to do."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """' Did you mean "question"?' if an option is close to the name, else nothing."""
    close = difflib.get_close_matches(name.lower(), {o.lower(): o for o in options}, n=1, cutoff=0.6)
    original = {o.lower(): o for o in options}
    return f' Did you mean "{original[close[0]]}"?' if close else ""


# ------------------------------------------------------------------------------------------------- files


def _decoded_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(f"{path}:{number}: not UTF-8 text. Save the file as UTF-8.") from None


def _json_object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: a row is a JSON object like {{"prompt": "..."}}, this is {_kind(value)}.')
    return value


def _kind(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "an object", bool: "a truth value", type(None): "null"}
    return names.get(
        type(value), f"a number ({value})" if isinstance(value, int | float) else str(type(value))
    )


def _read_jsonl(path: Path) -> Iterator[Raw]:
    for number, line in _decoded_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: not valid JSON ({error.msg}, column {error.colno}). "
                "Each line holds one whole JSON object; correct or remove this line."
            ) from None
        yield where, _json_object(value, where)


def _read_json(path: Path) -> Iterator[Raw]:
    text = "".join(line for _, line in _decoded_lines(path))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        hint = (
            "One object per line is called .jsonl: rename it." if error.msg == "Extra data" else "Correct it."
        )
        raise DataError(f"{path}:{error.lineno}: not valid JSON ({error.msg}). {hint}") from None
    if not isinstance(value, list):
        raise DataError(
            f"{path}: expected a list of objects, found {_kind(value)}. Write [{{...}}, {{...}}]."
        )
    for number, row in enumerate(value):
        yield f"{path} row {number}", _json_object(row, f"{path} row {number}")


def _read_csv(path: Path) -> Iterator[Raw]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a prompt may be longer than csv's default of 128 KiB
    reader = csv.reader((line for _, line in _decoded_lines(path)), strict=True)
    try:
        header = next((fields for fields in reader if fields), [])
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise DataError(f'{path}:1: the column "{twice}" stands twice. Rename one of them.')
        for fields in reader:
            where = f"{path}:{reader.line_num}"
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{where}: {len(fields)} fields, but the header has {len(header)} ({', '.join(header)}). "
                    'Put fields that hold commas or line breaks in "quotes".'
                )
            yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV ({error}). Correct this line.") from None


def _read_parquet(path: Path) -> Iterator[Raw]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a readable Parquet file ({reason}). Write the file again.") from None
    for number, row in enumerate(rows):
        yield f"{path} row {number}", row


READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_file(path: Path, key: str) -> list[Raw]:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in READERS)
        found = f"It holds {', '.join(inside[:8])}" if inside else "It holds no data file"
        raise DataError(f'{key}: "{path}" is a folder. {found}; name one file.')
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) or f' The folder "{path.parent}" ' + (
            "does not exist." if not path.parent.is_dir() else "exists, but has no such file."
        )
        raise DataError(f'{key}: no file "{path}".{hint}')
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f'{key}: "{path}" has no known ending. Use one of {", ".join(READERS)}.')
    return list(reader(path))


# --------------------------------------------------------------------------------------- hub and objects


def _from_dataset(dataset: Any, name: str) -> list[Raw]:
    if isinstance(dataset, Mapping):
        raise DataError(f"{name}: has the splits {', '.join(dataset)}. Choose one, such as {name}[split].")
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{name}: a streamed data set has no length. Pass list(dataset.take(1000)) instead.")
    return [(f"{name} row {number}", row) for number, row in enumerate(dataset.with_format(None))]


def _pick_split(splits: Mapping[str, Any], source: str, key: str, held_out: bool) -> str:
    wanted = ("test", "validation", "dev") if held_out else ("train",)
    for split in wanted:
        if split in splits:
            return split
    raise DataError(
        f'{key}: "{source}" has no split called {" or ".join(wanted)}, only {", ".join(splits)}. '
        f'Write {key}: "name:config:split".'
    )


def _from_hub(source: str, key: str, held_out: bool) -> list[Raw]:
    name, config, split = [*source.split(":", 2), "", ""][:3]
    import datasets

    try:
        loaded: Any = datasets.load_dataset(name, config or None, split=split or None)
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise DataError(_hub_problem(name, key, error)) from error
    if not split:
        loaded = loaded[_pick_split(loaded, source, key, held_out)]
    return _from_dataset(loaded, source)


def _hub_problem(name: str, key: str, error: Exception) -> str:
    reason = re.sub(r"\s+", " ", str(error)).strip()
    chain = f"{type(error).__name__} {reason} {error.__cause__} {error.__context__}".lower()
    if "gated" in chain or "401" in chain or "403" in chain:
        return f'{key}: "{name}" is gated. Accept its terms at hf.co/datasets/{name}, then run: hf auth login'
    if re.search(r"offline|connect|resolve|timed? ?out|max retries|couldn't reach", chain):
        return (
            f'{key}: cannot reach the hub and "{name}" is not cached. Give a local file instead '
            '(.jsonl, .parquet, .csv), or try "task:addition", which needs no network.'
        )
    if "doesn't exist" in chain or "not found" in chain:
        return f'{key}: no data set "{name}" on the hub and no such file. Check the spelling of {key}.'
    return f'{key}: cannot load "{name}" from the hub ({reason[:300]}). Write {key}: "name:config:split".'


def read_raw(source: Any, key: str, held_out: bool) -> list[Raw]:
    """The rows of any source but "task:NAME". key: the configuration's key that names it, for messages."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        looks_like_file = path.suffix.lower() in READERS or str(source).startswith((".", "/", "~"))
        if path.exists() or looks_like_file:
            return _read_file(path, key)
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:.*)?", str(source)):
            raise DataError(
                f'{key}: "{source}" is neither a file nor a hub id. '
                'Write FILE.jsonl, "name:config:split" or "task:addition".'
            )
        return _from_hub(str(source), key, held_out)
    if hasattr(source, "with_format") or hasattr(source, "column_names"):
        return _from_dataset(source, "data set")
    rows = list(source)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number}: a row is a mapping of columns, this is {_kind(row)}.")
    return [(f"row {number}", row) for number, row in enumerate(rows)]
