"""What `pip install` puts where. The wheel is built for real, without a network and outside the checkout."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import covey

ROOT = Path(__file__).parents[1]
ROOMS = ("rl", "rewards", "rollout", "kernels", "policies", "configs")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Built from a copy, because setuptools leaves build/ and *.egg-info where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    checkout.mkdir()
    for name in ("src", *ROOMS):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--quiet", "--disable-pip-version-check", "--wheel-dir", str(folder), str(checkout)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("covey-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_a_wheel_holds_covey_and_nothing_else_at_its_top(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    (metadata,) = tops - {"covey"}
    assert metadata.startswith("covey-") and metadata.endswith(".dist-info")


def test_a_wheel_holds_every_module_and_recipe(wheel_names: list[str]) -> None:
    real = {
        f"covey/{path.relative_to(ROOT)}"
        for room in ROOMS
        for pattern in ("*.py", "*.yaml", "*.html")
        for path in (ROOT / room).rglob(pattern)
    }
    real |= {"covey/__init__.py", "covey/__main__.py", "covey/py.typed"}
    packed = {name for name in wheel_names if name.startswith("covey/")}
    assert packed == real
    assert {"covey/rl/cli.py", "covey/configs/gsm8k.yaml"} <= packed
    assert any(name.startswith("covey/kernels/") for name in packed)


def test_a_wheel_carries_the_licence_and_the_command(wheel_names: list[str]) -> None:
    endings = {name.split(".dist-info/")[-1] for name in wheel_names}
    assert {"licenses/LICENSE", "entry_points.txt"} <= endings


def test_the_package_is_found_and_offers_its_functions() -> None:
    assert covey.__file__ is not None and Path(covey.__file__).name == "__init__.py"
    for room in ROOMS:
        assert importlib.util.find_spec(f"covey.{room}") is not None
    assert {"grpo", "sft", "dpo", "load_policy"} <= set(dir(covey))
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        covey.gpro  # noqa: B018
