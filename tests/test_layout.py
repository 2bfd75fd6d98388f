"""The shape of the project: who may import whom, and the traps of a folder that is called `kernels`."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "rl": {"rl", "rollout", "policies", "rewards", "kernels"},
    "rollout": {"rollout", "policies", "kernels"},
    "policies": {"policies", "kernels"},
    "kernels": {"kernels"},
    "rewards": {"rewards"},
}
FILES = [path.relative_to(ROOT) for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
OTHER_FILES = [
    path.relative_to(ROOT)
    for folder in ("tests", "benchmarks", "src/covey")
    for path in sorted((ROOT / folder).glob("*.py" if folder.startswith("src") else "**/*.py"))
]
LIGHT = ("rl/cli.py", "rl/config.py", "rl/config_file.py", "rl/config_hints.py", "rl/config_yaml.py")
HEAVY = {
    "torch",
    "triton",
    "transformers",
    "datasets",
    "peft",
    "bitsandbytes",
    "accelerate",
    "numpy",
    "pandas",
}
MAX_LINES = 450


def imports(path: Path, *, module_level: bool = False) -> list[str]:
    """Names of the modules that a file imports ("covey.rl.batch"); a relative one begins with a dot."""
    tree = ast.parse((ROOT / path).read_text())
    names = []
    for node in tree.body if module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            from_room = module.startswith("covey") and module.count(".") < 2  # then the names are modules
            names += [f"{module}.{alias.name}" for alias in node.names] if from_room else [module]
    return names


def test_there_is_something_to_check() -> None:
    assert {path.parts[0] for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    ours = [name.split(".") for name in imports(path) if name.split(".")[0] == "covey"]
    assert {".".join(name[1:2]) for name in ours} <= MAY_IMPORT[path.parts[0]]


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "kernels"], ids=str)
def test_kernels_know_torch_and_triton_only(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"covey"}
    assert outside <= {"torch", "triton"}


@pytest.mark.parametrize("path", FILES + OTHER_FILES, ids=str)
def test_imports_of_ours_are_absolute_and_name_a_module(path: Path) -> None:
    """`rl.batch` beside `covey.rl.batch` would be a second module with second classes."""
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in MAY_IMPORT, f"{name}: write covey.{name}"
        assert not name.startswith("."), f"{name}: write the absolute name"
        if parts[0] == "covey" and len(parts) > 2:
            place = ROOT / "/".join(parts[1:])
            assert place.with_suffix(".py").exists() or place.is_dir(), f"{name} is not a module"


@pytest.mark.parametrize("path", LIGHT)
def test_nothing_heavy_on_the_way_to_a_configuration_error(path: str) -> None:
    names = {name.split(".")[0] for name in imports(Path(path), module_level=True)}
    assert not names & HEAVY


def test_the_package_itself_imports_nothing_heavy() -> None:
    names = {name.split(".")[0] for name in imports(Path("src/covey/__init__.py"), module_level=True)}
    assert names <= set(sys.stdlib_module_names)


def test_kernels_is_no_regular_package() -> None:
    """With the checkout on sys.path transformers would take it for the Hugging Face package `kernels`."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_module_is_named_like_one_of_python(path: Path) -> None:
    assert path.stem not in sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_readable(path: Path) -> None:
    lines = len((ROOT / path).read_text().splitlines())
    assert lines < MAX_LINES, f"{lines} lines: which noun wants to leave?"


@pytest.mark.parametrize("room", [*MAY_IMPORT, "configs"])
def test_the_package_links_to_the_real_folders(room: str) -> None:
    link = ROOT / "src" / "covey" / room
    assert link.is_symlink() and link.resolve() == ROOT / room
