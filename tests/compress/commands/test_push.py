"""`compress push` against a stand-in of the hub: which bytes arrive, what stays, and what is said when it cannot be done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serve
from huggingface_hub import constants

from compress.cli import main
from export import export


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_ours")
        yield found


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    (path / "secret.env").write_text("ours")
    (path / ".compress").mkdir()
    (path / ".compress" / "run.json").write_text("{}")
    (path / "drafter.json").write_text("{}")
    return path


def test_the_bytes_arrive_and_what_is_no_part_stays(
    hub: Hub, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = "---\nlicense: mit\n---\n# Ours\n"
    (artifact / "README.md").write_text(edited)
    code = main(["push", str(artifact), "org/name", "--private", "--commit-message", "First"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"{hub.endpoint}/org/name" in said.out
    found = hub.files["org/name@main"]
    manifest = json.loads((artifact / "compress.json").read_text())
    assert found.keys() == {*manifest["files"], "compress.json", "report.html", "README.md"}
    assert all(content == (artifact / name).read_bytes() for name, content in found.items())
    assert any(name.endswith(".safetensors") for name in found)
    assert found["README.md"].decode() == edited
    assert (hub.private, hub.messages) == ([True], ["First"])
    assert "Bearer hf_ours" in hub.tokens
    assert "contain local paths" in said.err, "the manifest names the source"


def test_a_missing_card_is_written_and_a_branch_is_made(hub: Hub, artifact: Path) -> None:
    written = (artifact / "README.md").read_text()
    (artifact / "README.md").unlink()
    assert main(["push", str(artifact), "org/name", "--revision", "w4", "--json"]) == 0
    assert hub.files["org/name@w4"]["README.md"].decode() == written


def test_a_private_push_never_ends_in_a_public_repository(
    hub: Hub, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.public = {"org/name"}
    assert main(["push", str(artifact), "org/name", "--private"]) == 2
    assert "org/name exists and is public" in capsys.readouterr().err
    assert main(["push", str(artifact), "org/name", "--revision", ""]) == 2
    assert "--revision: the name is empty" in capsys.readouterr().err
    assert hub.files == {}


def test_links_bring_no_other_file_along(
    hub: Hub, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("ours")
    (artifact / "README.md").unlink()
    (artifact / "README.md").symlink_to(tmp_path / "key")
    assert main(["push", str(artifact), "org/name"]) == 2
    assert "README.md is a link that leads out of the directory" in capsys.readouterr().err
    assert hub.files == {}


def test_all_local_paths_are_named(hub: Hub, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "compress apply llama_w4 --set calibration.data=/home/me/mine.txt"
    (artifact / "run.json").write_text(json.dumps({"runs": [{"command": command}]}))
    assert main(["push", str(artifact), "org/name"]) == 0
    assert "/home/me/mine.txt" in capsys.readouterr().err


def test_an_export_is_published(hub: Hub, tiny_artifact: Path, tmp_path: Path) -> None:
    made = export(tiny_artifact, "huggingface", tmp_path / "made", verify=False, quiet=True)
    assert main(["push", str(made.path), "org/name"]) == 0
    assert hub.files["org/name@main"].keys() == {file.name for file in made.path.iterdir() if file.is_file()}


def test_what_cannot_be_published_is_said(
    hub: Hub,
    artifact: Path,
    tiny_llama: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(code: int, words: str, path: Path = artifact, repo: str = "org/name") -> None:
        assert main(["push", str(path), repo]) == code
        said = capsys.readouterr().err.splitlines()[-1]
        assert words in said, said

    refused(2, "is a checkpoint that compress did not write", tiny_llama())
    refused(2, "is not a repository name", repo="a/b/c")
    for status, words in (
        (401, "does not accept this login"),
        (403, "may not write to it (read only)"),
        (500, "answered 500 (read only)"),
    ):
        hub.failing = {"/api/": (status, "read only")}
        refused(1, words)
    hub.failing = {"/commit/": (404, "gone")}
    refused(1, "no repository of that name that this login may write to")
    hub.failing = {}
    (artifact / "README.md").write_text("---\nlicense: nonsense\n---\n")
    refused(1, '"license" must be one of')
    assert hub.files == {}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(1, "cannot be reached")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(1, "HF_HUB_OFFLINE is set")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(artifact / "no-token"))
    refused(2, "run `hf auth login`, or set HF_TOKEN")
    weights = next(artifact.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    refused(1, "content differs from its SHA-256")
