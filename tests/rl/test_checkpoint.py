import errno
import json
import os
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from covey.rl.checkpoint import RunError, list_checkpoints, load_checkpoint, remove_leftovers, save_checkpoint


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    flat = torch.arange(6, dtype=torch.float32)
    state = {
        "optim": {
            "0/exp_avg": flat[:3],
            "0/exp_avg_sq": flat[1:4],
            "0/step": torch.tensor(7.0),
            "skipped": 2,
        },
        "cursor": {"epoch": 3, "order": [4, 1, 2], "seed": 2**80 + 1},
        "weights": [torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16), torch.empty(0, 4)],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "ratio": 0.1 + 0.2,
        "lowest": float("-inf"),
        "name": "Grüße",
        "done": False,
        "nothing": None,
        "empty": {},
    }
    path = save_checkpoint(tmp_path, 100, adapter_writer=_adapter, state=state)
    assert path == tmp_path / "checkpoints" / "step-000100"
    checkpoint = load_checkpoint(path)

    assert checkpoint.step == 100
    assert (checkpoint.adapter / "adapter_config.json").read_text() == "{}"
    got = checkpoint.state
    assert got["optim"]["0/exp_avg"].tolist() == [0, 1, 2] and got["optim"]["0/exp_avg_sq"].tolist() == [
        1,
        2,
        3,
    ]
    assert got["optim"]["0/step"].item() == 7.0 and got["optim"]["0/step"].shape == ()
    assert got["optim"]["skipped"] == 2
    assert got["cursor"] == {"epoch": 3, "order": [4, 1, 2], "seed": 2**80 + 1}
    assert got["weights"][0].dtype == torch.bfloat16 and got["weights"][1].shape == (0, 4)
    assert got["weights"][0].view(torch.int16).tolist() == state["weights"][0].view(torch.int16).tolist()
    assert got["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]] and got["transposed"].dtype == torch.int64
    plain = ("ratio", "lowest", "name", "done", "nothing", "empty")
    assert {key: got[key] for key in plain} == {key: state[key] for key in plain}


def _draws() -> tuple[list[float], list[float], list[float], list[float]]:
    return (
        [random.random() for _ in range(3)] + [random.gauss(0, 1)],
        np.random.standard_normal(3).tolist(),
        torch.randn(3).tolist(),
        torch.randn(1, dtype=torch.float64).tolist(),
    )


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    # Odd numbers of normal draws: the generators then hold a spare one, which has to be kept as well.
    random.gauss(0, 1)
    np.random.standard_normal(1)
    torch.randn(1, dtype=torch.float64)
    path = save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={})
    expected = _draws()
    for seed in (None, 0):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed or 1)
        load_checkpoint(path).restore_rng()
        assert _draws() == expected


@pytest.mark.gpu
def test_the_gpus_generator_goes_on_too(tmp_path: Path) -> None:
    torch.cuda.manual_seed(5)
    torch.randn(3, device="cuda")
    path = save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={"x": torch.ones(2, device="cuda")})
    expected = torch.randn(3, device="cuda")
    torch.cuda.manual_seed(0)
    checkpoint = load_checkpoint(path)
    checkpoint.restore_rng()
    assert torch.equal(torch.randn(3, device="cuda"), expected)
    assert checkpoint.state["x"].device.type == "cpu"


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 3, 999_999, 1_000_000):
        save_checkpoint(tmp_path, step, adapter_writer=_adapter, state={}, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [999_999, 1_000_000]  # by number, not by name
    assert _names(tmp_path) == ["step-1000000", "step-999999"]


def test_the_new_checkpoint_is_never_the_one_to_go(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 90, adapter_writer=_adapter, state={}, keep=1)
    save_checkpoint(tmp_path, 10, adapter_writer=_adapter, state={}, keep=1)
    assert _names(tmp_path) == ["step-000010"]


def test_a_step_that_is_saved_again_replaces_itself(tmp_path: Path) -> None:
    for value in (1, 2):
        path = save_checkpoint(tmp_path, 5, adapter_writer=_adapter, state={"value": value})
    assert load_checkpoint(path).state == {"value": 2}
    assert _names(tmp_path) == ["step-000005"]


@pytest.mark.parametrize(
    "name", ["state.safetensors", "state.json", "rng.json", "adapter/adapter_config.json"]
)
def test_a_truncated_file_gives_a_sentence(tmp_path: Path, name: str) -> None:
    older = save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={"x": torch.ones(8)})
    path = save_checkpoint(tmp_path, 2, adapter_writer=_adapter, state={"x": torch.ones(8)})
    size = (path / name).stat().st_size
    os.truncate(path / name, size - 1)
    with pytest.raises(RunError, match=rf"{name} has {size - 1} bytes instead of {size}.*--resume {older}"):
        load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(RunError, match=rf"{name} is missing"):
        load_checkpoint(path)


def test_bytes_that_changed_and_manifests_that_do_not_fit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={"x": 1})
    manifest = path / "checkpoint.json"
    text = manifest.read_text()
    (path / "state.json").write_text("{" * (path / "state.json").stat().st_size)
    with pytest.raises(RunError, match="damaged"):
        load_checkpoint(path)
    manifest.write_text(json.dumps(json.loads(text) | {"format": 99}))
    with pytest.raises(RunError, match="checkpoint format 99"):
        load_checkpoint(path)
    manifest.write_text(text[:20])
    with pytest.raises(RunError, match=r"checkpoint\.json cannot be read"):
        load_checkpoint(path)
    manifest.unlink()
    with pytest.raises(RunError, match=r"not a complete checkpoint: checkpoint\.json is missing"):
        load_checkpoint(path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "part").write_text("half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={})
    with pytest.raises(RunError, match=r"step 2 .* no space left on device.* checkpoint is that of step 1\b"):
        save_checkpoint(tmp_path, 2, adapter_writer=full, state={})
    assert _names(tmp_path) == ["step-000001"]


def test_a_write_that_the_system_refuses_half_way(tmp_path: Path) -> None:
    """The tensors do not fit under the process's limit on file sizes, as they would not on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(RunError, match="step 7 could not be written"):
            save_checkpoint(tmp_path, 7, adapter_writer=_adapter, state={"x": torch.ones(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert _names(tmp_path) == []


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"not a directory.*run\.dir"):
        save_checkpoint(tmp_path / "file", 1, adapter_writer=_adapter, state={})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
def test_other_errors_pass_through_and_leave_nothing(tmp_path: Path, error: BaseException) -> None:
    def broken(folder: Path) -> None:
        (folder / "part").write_text("half of it")
        raise error

    with pytest.raises(type(error)):
        save_checkpoint(tmp_path, 2, adapter_writer=broken, state={})
    assert _names(tmp_path) == []


def test_what_is_neither_tensor_nor_plain_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state/a/1: .* not set"):
        save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={"a": [1, {2}]})
    with pytest.raises(TypeError, match=r"state/a: .* strings, got \[1\]"):
        save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={"a": {1: 2}})
    assert _names(tmp_path) == []


def test_what_a_crash_left_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, adapter_writer=_adapter, state={})
    for name in (".tmp-step-000002", ".tmp-old-step-000000"):
        (tmp_path / "checkpoints" / name / "adapter").mkdir(parents=True)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1]
    save_checkpoint(tmp_path, 2, adapter_writer=_adapter, state={})  # over the leftover of the same name
    remove_leftovers(tmp_path)
    assert _names(tmp_path) == ["step-000001", "step-000002"]


def test_no_checkpoints_yet(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    remove_leftovers(tmp_path)
