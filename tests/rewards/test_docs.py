"""docs/rewards.md does what it says."""

import re
from pathlib import Path

from covey.rewards.reward import BUILTINS, ENGINE_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_examples_run():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:  # a page is read from top to bottom: later examples may use earlier ones
        exec(compile(block, "docs/rewards.md", "exec"), names)


def test_every_builtin_and_parameter_is_there():
    for name in (*BUILTINS, *ENGINE_NAMES["completion"], *ENGINE_NAMES["completions"]):
        assert f"`{name}" in PAGE, name
