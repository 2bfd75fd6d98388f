"""Which implementation runs, and what is said when it is not the one that was asked for."""

import logging
from collections.abc import Iterator

import pytest
import torch

from covey.kernels import dispatch
from covey.kernels.dispatch import use_triton

X = torch.zeros(2)
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What was found out about a device belongs to the environment that a test made up."""
    for moment in range(2):
        dispatch._obstacle.cache_clear()
        dispatch._warn.cache_clear()
        if moment == 0:
            yield


def test_torch_on_a_cpu_unless_triton_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, expected in (("auto", False), ("reference", False), ("triton", True)):
        monkeypatch.setenv("COVEY_KERNELS", choice)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert use_triton(X, "kernel") is expected
    monkeypatch.delenv("COVEY_KERNELS")
    assert not use_triton(X, "kernel")


def test_an_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_KERNELS", "fast")
    with pytest.raises(ValueError, match="COVEY_KERNELS=fast: one of auto, triton, reference"):
        use_triton(X, "kernel")


@cpu_only
@pytest.mark.parametrize(
    ("x", "interpret", "unless", "reason"),
    [
        (X, "1", "head dimension 300", "head dimension 300"),
        (X.bfloat16(), "1", "", "Triton's interpreter has no bfloat16 arithmetic"),
        (X, "0", "", "Triton has no cpu backend here; TRITON_INTERPRET=1 runs its kernels on a CPU, slowly"),
    ],
)
def test_falling_back_names_kernel_and_reason_once(x, interpret, unless, reason, monkeypatch, caplog) -> None:
    monkeypatch.setenv("COVEY_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with caplog.at_level(logging.WARNING, logger="covey"):
        assert not use_triton(x, "rope", unless) and not use_triton(x, "rope", unless)
    assert [record.getMessage() for record in caplog.records] == [
        f"rope: the torch reference runs instead of the Triton kernel ({reason})"
    ]
