"""Which implementation a kernel's test runs.

A test module's REFERENCES are the module under test and the names of its torch references. While the kernels are tested
these are gone, so that a silent fall back to torch fails the test.
"""

import pytest


def choose(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_KERNELS", name)
    module, references = request.module.REFERENCES
    for reference in references if name == "triton" else ():
        monkeypatch.setattr(module, reference, None)


@pytest.fixture(params=["triton", "reference"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    choose(request.param, request, monkeypatch)
    return request.param


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("triton", request, monkeypatch)
