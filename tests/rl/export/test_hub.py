"""Pushing, against a stand-in for the hub's API."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from covey.rl.checkpoint import RunError
from covey.rl.export.export import export
from covey.rl.export.source import ExportError


class FakeHub:
    """Remembers what HfApi's methods were called with. `public`: repositories that are there and can be read by all."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.repos: dict[str, bool] = {}  # name: private
        self.uploaded: dict[str, set[str]] = {}
        self.fails: dict[str, Exception] = {}

    def __call__(self) -> "FakeHub":
        return self

    def _called(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self.fails:
            raise self.fails[name]

    def whoami(self) -> dict[str, str]:
        self._called("whoami")
        return {"name": "me"}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        self._called("create_repo", repo_id=repo_id, private=private, exist_ok=exist_ok)
        self.repos.setdefault(repo_id, private)
        return f"https://hub/{repo_id}"

    def repo_info(self, repo_id: str) -> SimpleNamespace:
        self._called("repo_info", repo_id=repo_id)
        return SimpleNamespace(private=self.repos[repo_id])

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self._called("upload_folder", repo_id=repo_id, commit_message=commit_message)
        self.uploaded[repo_id] = {path.name for path in Path(folder_path).iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


def test_a_new_repository_is_private_and_gets_every_file(hub: FakeHub, llama: Path, tmp_path: Path) -> None:
    said: list[str] = []
    out = export(llama, out=tmp_path / "out", push="me/model", say=said.append)
    assert [name for name, _ in hub.calls] == ["whoami", "create_repo", "repo_info", "upload_folder"]
    assert hub.repos == {"me/model": True}
    assert (
        hub.uploaded["me/model"]
        == {path.name for path in out.iterdir()}
        >= {"README.md", "model.safetensors"}
    )
    assert 'from_pretrained("me/model")' in (out / "README.md").read_text()
    assert said[-1] == "pushed   https://hub/me/model"


def test_public_is_only_what_is_called_public(hub: FakeHub, llama: Path, tmp_path: Path) -> None:
    hub.repos["me/open"] = False
    with pytest.raises(
        ExportError, match=r"me/open exists and everyone can read it; say --public .* complete"
    ):
        export(llama, out=tmp_path / "a", push="me/open")
    assert not hub.uploaded and (tmp_path / "a" / "README.md").is_file()
    export(llama, out=tmp_path / "b", push="me/open", public=True)
    export(llama, out=tmp_path / "c", push="me/new", public=True)
    assert set(hub.uploaded) == {"me/open", "me/new"} and hub.repos["me/new"] is False


def test_what_can_be_known_before_is_said_before(
    hub: FakeHub, llama: Path, tmp_path: Path, train: Any
) -> None:
    hub.fails["whoami"] = LocalTokenNotFoundError("no token")
    with pytest.raises(ExportError, match=r"--push me/model: you are not logged in; run `hf auth login`"):
        export(llama, out=tmp_path / "out", push="me/model")
    with pytest.raises(ExportError, match=r"--push a/b/c: "):
        export(llama, out=tmp_path / "out", push="a/b/c")
    hub.fails["whoami"] = ConnectionError("no route")
    with pytest.raises(RunError, match=r"the hub does not answer as it should \(no route\)"):
        export(llama, out=tmp_path / "out", push="me/model")
    _, adapter = train(llama, tmp_path / "adapter", method="lora")
    with pytest.raises(
        ExportError, match=r"known on this machine alone; say which model of the hub it is with --base"
    ):
        export(adapter, "adapter", push="me/adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"] and not hub.repos


def test_a_failing_upload_leaves_the_export(hub: FakeHub, llama: Path, tmp_path: Path) -> None:
    hub.fails["upload_folder"] = ConnectionError("reset")
    with pytest.raises(
        RunError, match=r"out is complete, but could not be pushed to me/model \(reset\); `hf upload"
    ):
        export(llama, out=tmp_path / "out", push="me/model")
    assert (tmp_path / "out" / "model.safetensors").is_file()
