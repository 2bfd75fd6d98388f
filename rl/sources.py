"""Where rows come from: files, the Hugging Face hub, data set objects and Python lists.

Values arrive as they were written: "007" stays text and 7 stays a number, because a reward may compare them.
"""

import difflib
import glob
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from covey.rl.data_config import SourceSection
from covey.rl.files import READERS, ArrowRow, DataError, Raw, ending, kind_of, read_text_whole

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Found:
    """The rows of a source. name: what it is called. bad: rows that were left out (data.malformed: skip)."""

    name: str
    rows: list[Raw]
    bad: list[DataError] = field(default_factory=list)

    def check_any(self, key: str, source: Any) -> None:
        """Raises DataError if there is no row at all; key: data.train or data.eval."""
        if not self.rows:
            name = source if isinstance(source, str) else "the data set"
            empty = DataError(f"{key}: {name} has no rows. Give a data set with at least one.")
            raise self.bad[0] if self.bad else empty

    def each(self, make: Callable[[int, str, Mapping[str, Any]], T], key: str, skip: bool) -> list[T]:
        """make(index, where, values) of every row. With skip, rows that are malformed are left out and logged."""
        made: list[T] = []
        for where, values in self.rows:
            try:
                made.append(make(len(made), where, values))
            except DataError as error:
                if not skip:
                    raise
                self.bad.append(error)
        if not made:
            raise self.bad[0]
        if self.bad:
            logger.warning(
                "%s: %d of %d rows are malformed and were skipped; the first: %s",
                *(key, len(self.bad), len(self.bad) + len(made), self.bad[0]),
            )
        return made


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """' Did you mean "question"?' if an option is close to the name, else nothing."""
    close = difflib.get_close_matches(name.lower(), {o.lower(): o for o in options}, n=1, cutoff=0.6)
    original = {o.lower(): o for o in options}
    return f' Did you mean "{original[close[0]]}"?' if close else ""


# ------------------------------------------------------------------------------------------------- files

SAME_KIND = {".ndjson": ".jsonl"}


def _kind(path: Path) -> str:
    return SAME_KIND.get(ending(path), ending(path))


def _one_kind(paths: list[Path], source: str, key: str) -> list[Path]:
    """The paths, sorted; raises DataError if a reader would have to choose among them."""
    kinds = sorted({_kind(path) for path in paths})
    if len(kinds) > 1:
        raise DataError(
            f'{key}: "{source}" holds files of the kinds {", ".join(kinds)}. '
            f'Choose one with a pattern, such as "{_pattern(source, kinds[0])}".'
        )
    return sorted(paths)


def _pattern(source: str, kind: str) -> str:
    folder = Path(source).parent if glob.has_magic(source) else Path(source)
    return str(folder / f"*{kind}")


def _in_folder(path: Path, key: str) -> list[Path]:
    """The data files of a folder, without those in folders inside it and hidden ones."""
    inside = [p for p in path.iterdir() if p.is_file() and p.name[0] not in "._" and ending(p)]
    if not inside:
        raise DataError(f'{key}: "{path}" is a folder without a data file. Use one of {", ".join(READERS)}.')
    return _one_kind(inside, str(path), key)


def _matching(pattern: str, key: str) -> list[Path]:
    paths = [p for p in map(Path, glob.glob(pattern, recursive=True)) if p.is_file()]
    if not paths:
        raise DataError(f'{key}: no file matches "{pattern}".')
    if other := [p for p in paths if not ending(p)]:
        raise DataError(
            f'{key}: "{pattern}" matches "{other[0]}", which has no known ending. Use one of {", ".join(READERS)}.'
        )
    return _one_kind(paths, pattern, key)


def _read_files(paths: list[Path], name: str, skip: bool, *, whole: bool) -> Found:
    """whole: a text file is one row instead of one per line."""
    found = Found(name, [])
    for row in _reader(paths, whole=whole)():
        if not isinstance(row, DataError):
            found.rows.append(row)
        elif skip:
            found.bad.append(row)
        else:
            raise row
    return found


def _reader(paths: list[Path], *, whole: bool) -> Callable[[], Iterator[Raw | DataError]]:
    """whole: a text file is one row instead of one per line."""

    def read() -> Iterator[Raw | DataError]:
        for path in paths:
            reader = read_text_whole if whole and _kind(path) == ".txt" else READERS[ending(path)]
            yield from reader(path)

    return read


def _read_path(path: Path, key: str, held_out: bool, skip: bool) -> Found:
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return Found(str(path), _from_saved(path, key, held_out))
        return _read_files(_in_folder(path, key), str(path), skip, whole=True)
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings) or f' The folder "{path.parent}" ' + (
            "does not exist." if not path.parent.is_dir() else "exists, but has no such file."
        )
        raise DataError(f'{key}: no file "{path}".{hint}')
    if not ending(path):
        raise DataError(f'{key}: "{path}" has no known ending. Use one of {", ".join(READERS)}.')
    return _read_files([path], str(path), skip, whole=False)


def _from_saved(path: Path, key: str, held_out: bool) -> list[Raw]:
    """A folder that `save_to_disk` of a data set has written."""
    import datasets

    loaded: Any = datasets.load_from_disk(str(path))
    if isinstance(loaded, Mapping):
        split = _pick_split(loaded, str(path), key, held_out, f"{path}/SPLIT")
        loaded = loaded[split]
    return _from_dataset(loaded, str(path))


# --------------------------------------------------------------------------------------- hub and objects


def _from_dataset(dataset: Any, name: str) -> list[Raw]:
    if isinstance(dataset, Mapping):
        raise DataError(f"{name}: has the splits {', '.join(dataset)}. Choose one, such as {name}[split].")
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name}: a streamed data set has no length. Set data.streaming (SFT), or pass list(dataset.take(1000))."
        )
    return [(f"{name} row {number}", ArrowRow(row)) for number, row in enumerate(dataset.with_format(None))]


def _as_rows(source: Any) -> Any:
    """A data frame of pandas or polars, or a table of pyarrow, as a data set; anything else as it is."""
    name = f"{type(source).__module__.partition('.')[0]}.{type(source).__name__}"
    if name not in ("pandas.DataFrame", "polars.DataFrame", "pyarrow.Table"):
        return source
    import datasets

    try:
        if name == "pandas.DataFrame":
            return datasets.Dataset.from_pandas(source, preserve_index=False)
        return (
            datasets.Dataset.from_polars(source) if name == "polars.DataFrame" else datasets.Dataset(source)
        )
    except (ValueError, TypeError) as error:  # a column of several kinds, such as numbers and text
        said = " ".join(str(error).split())
        raise DataError(
            f"a {name} with a column that Arrow cannot hold ({said}). Give a list of dicts."
        ) from error


def _pick_split(splits: Mapping[str, Any], source: str, key: str, held_out: bool, write: str) -> str:
    wanted = ("test", "validation", "dev") if held_out else ("train",)
    for split in wanted:
        if split in splits:
            return split
    raise DataError(
        f'{key}: "{source}" has no split called {" or ".join(wanted)}, only {", ".join(splits)}. '
        f'Write {key}: "{write}".'
    )


def _from_hub(source: str, key: str, held_out: bool) -> list[Raw]:
    name, config, split = [*source.split(":", 2), "", ""][:3]
    loaded = _load_from_hub(name, key, config or None, split=split or None)
    if not split:
        loaded = loaded[_pick_split(loaded, source, key, held_out, "name:config:split")]
    return _from_dataset(loaded, source)


def _load_from_hub(name: str, key: str, config: str | None, **how: Any) -> Any:
    """What `load_dataset` makes of it, except that all values of CSV files stay text, as those of local ones do."""
    import datasets

    try:
        loaded: Any = datasets.load_dataset(name, config, **how)
        part = next(iter(loaded.values())) if isinstance(loaded, Mapping) else loaded
        if part.info.builder_name != "csv":
            return loaded
        columns = part.column_names or list(next(iter(part)))
        text = datasets.Features({column: datasets.Value("string") for column in columns})
        return datasets.load_dataset(name, config, features=text, keep_default_na=False, **how)
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise DataError(_hub_problem(name, key, error)) from error


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


def read_source(source: Any, key: str, held_out: bool, *, skip: bool = False, seed: int = 0) -> Found:
    """The rows of any source but "task:NAME", which are malformed in no row, or, with skip, without those that are.

    key: the configuration's key that names it, for messages. seed: chooses rows where a weight is no whole number.
    """
    if isinstance(source, Found):
        return source
    if isinstance(source, list) and source and isinstance(source[0], SourceSection):
        parts = [_weighted(s, f"{key}.{k}", held_out, skip, f"{seed}:{k}") for k, s in enumerate(source)]
        return Found(
            " + ".join(part.name for part in parts),
            [row for part in parts for row in part.rows],
            [error for part in parts for error in part.bad],
        )
    if isinstance(source, str | Path):
        return _read_named(str(source), key, held_out, skip)
    source = _as_rows(source)
    if hasattr(source, "with_format") or hasattr(source, "column_names"):
        rows = _from_dataset(source, "data set")
        return Found(f"{len(rows)} rows given in Python", rows)
    rows = list(source)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number}: a row is a mapping of columns, this is {kind_of(row)}.")
    return Found(f"{len(rows)} rows given in Python", [(f"row {n}", row) for n, row in enumerate(rows)])


def _read_named(source: str, key: str, held_out: bool, skip: bool) -> Found:
    path = Path(source).expanduser()
    looks_like_file = bool(ending(path)) or source.startswith((".", "/", "~"))
    if path.exists():
        return _read_path(path, key, held_out, skip)
    if "*" in source or "?" in source or (looks_like_file and "[" in source):
        return _read_files(_matching(str(path), key), source, skip, whole=True)
    if looks_like_file:
        return _read_path(path, key, held_out, skip)
    if source == "environment":
        raise DataError(
            f"{key}: only environments of verifiers bring rows along, in covey grpo with environment.use: "
            '"verifiers:NAME". Write ./environment for a file of this name.'
        )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:.*)?", source):
        raise DataError(
            f'{key}: "{source}" is neither a file nor a hub id. '
            'Write FILE.jsonl, "name:config:split" or "task:addition".'
        )
    return Found(source, _from_hub(source, key, held_out))


def open_stream(source: Any, key: str) -> tuple[str, Callable[[], Iterator[Raw | DataError]]]:
    """(what the source is called, what reads it from its first row on, once per call) without holding its rows.

    source: a file, folder, glob or hub id, or any object in Python that can be iterated more than once.
    """
    if not isinstance(source, str | Path):
        source = _as_rows(source)
        if iter(source) is source:
            raise DataError(
                f"{key}: an iterator ends after one epoch. Give what it was made from, or a list."
            )
        kind: Callable[[Any], Any] = ArrowRow if hasattr(source, "with_format") else lambda row: row
        return "rows given in Python", lambda: ((f"row {n}", kind(row)) for n, row in enumerate(source))
    if str(source).startswith("task:"):
        raise DataError(f"data.streaming: {source} is made in memory anyway. Leave data.streaming out.")
    path = Path(source).expanduser()
    name, is_pattern = str(source), "*" in str(source) or "?" in str(source)
    if path.is_dir() and not (path / "dataset_dict.json").exists() and not (path / "state.json").exists():
        return name, _reader(_in_folder(path, key), whole=True)
    if is_pattern and not path.exists():
        return name, _reader(_matching(str(path), key), whole=True)
    if path.is_file() and ending(path):
        return name, _reader([path], whole=False)
    if path.exists() or ending(path) or name.startswith((".", "/", "~")):
        rows = _read_path(path, key, False, False).rows  # a saved data set, mapped into memory; or an error
        return name, lambda: iter(rows)
    return name, _hub_reader(name, key)


def _hub_reader(source: str, key: str) -> Callable[[], Iterator[Raw | DataError]]:
    name, config, split = [*source.split(":", 2), "", ""][:3]
    loaded = _load_from_hub(name, key, config or None, split=split or "train", streaming=True)
    return lambda: ((f"{source} row {number}", ArrowRow(row)) for number, row in enumerate(loaded))


def _weighted(source: SourceSection, key: str, held_out: bool, skip: bool, seed: str) -> Found:
    """Weight 2.5: every row twice, and a random half of them once more. The rows keep their order."""
    if source.path.startswith("task:"):
        raise DataError(
            f'{key}: "{source.path}" stands alone. Write data.train: {source.path}, without a list.'
        )
    found = _read_named(source.path, key, held_out, skip)
    if not found.rows:
        raise DataError(f"{key}: {source.path} has no rows. Give a data set with at least one.")
    count = len(found.rows)
    if source.weight != 1:
        wanted = max(1, round(source.weight * count))
        more = set(random.Random(seed).sample(range(count), wanted % count))
        found.rows = [row for k, row in enumerate(found.rows) for _ in range(wanted // count + (k in more))]
    of = "" if source.weight == 1 else f" of {count} x {source.weight:g}"
    found.name = f"{source.path} ({len(found.rows)}{of})"
    return found


def read_raw(source: Any, key: str, held_out: bool) -> list[Raw]:
    """The rows of `read_source`, none of them malformed."""
    return read_source(source, key, held_out).rows
