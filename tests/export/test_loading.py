"""`runtime.load` of directories with an export.json: whose it is, and what `verify` compares with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import export
import runtime
from compress.cli import main
from export.target import missing_packages
from runtime.checkpoint.export_directory import find_export
from runtime.errors import ArtifactError, RequestError

Make = Callable[..., Path]
NEEDS = {"huggingface": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "triton": ("triton",)}
OPTIONS: dict[str, dict[str, Any]] = {"triton": {"gpus": ["sm_90"], "configs": "default"}}


@pytest.fixture(scope="module")
def written(made: Make, few_launches: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`written("huggingface")`: an export that nobody changes."""
    done: dict[str, Path] = {}

    def write(target: str) -> Path:
        if missing_packages(NEEDS[target]):
            pytest.skip(f"{NEEDS[target][0]} is not installed")
        if target not in done:
            output = tmp_path_factory.mktemp("exports") / target
            options = OPTIONS.get(target, {})
            with few_launches() if target == "triton" else nullcontext():
                export.export(made("w4_g128"), target, output, verify=False, quiet=True, **options)
            done[target] = output
        return done[target]

    return write


@pytest.fixture
def exported(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """`exported("huggingface")`: an export to change."""
    return lambda target: Path(shutil.copytree(written(target), tmp_path / "out"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "export.json").read_text())


def tokens(path: Path, **options: Any) -> list[int]:
    return runtime.load(path, device="cpu", **options).generate([5, 6, 7], max_new_tokens=4)


# ---------------------------------------------------------------- verify
@pytest.mark.slow
@pytest.mark.parametrize("target", NEEDS)
def test_every_file_is_compared(written: Callable[[str], Path], tmp_path: Path, target: str) -> None:
    whole = written(target)
    assert tokens(whole, verify=True)
    listed = manifest_of(whole)["files"]
    assert "README.md" in listed
    for name, entry in listed.items():
        assert (whole / name).stat().st_size == entry["bytes"]
        folder = Path(shutil.copytree(whole, tmp_path / "out"))
        flip(folder / name)
        with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
            runtime.load(folder, device="cpu", verify=True)
        shutil.rmtree(folder)


def test_a_hugging_face_export_is_compared_without_being_asked(exported: Callable[[str], Path]) -> None:
    folder = exported("huggingface")
    (folder / "README.md").write_text("a model card")
    assert tokens(folder), "README.md is for people, who may write their own"
    with pytest.raises(ArtifactError, match=r"README\.md"):
        runtime.load(folder, verify=True)
    flip(folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"SHA-256: model\.safetensors; verify=False"):
        runtime.load(folder)
    assert tokens(folder, verify=False)


def test_missing_files_and_files_that_nobody_listed(exported: Callable[[str], Path]) -> None:
    folder = exported("huggingface")
    (folder / "generation_config.json").unlink()
    with pytest.raises(ArtifactError, match=r"missing: generation_config\.json"):
        runtime.load(folder, verify=True)
    manifest = manifest_of(folder)
    del manifest["files"]["model.safetensors"], manifest["files"]["generation_config.json"]
    (folder / "export.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"not in export\.json: model\.safetensors"):
        runtime.load(folder, verify=True)


@pytest.mark.slow
def test_files_of_the_artifact_are_hashed_once(written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An export to triton has two manifests, and its weights stand in both."""
    from runtime.checkpoint import artifact

    folder, seen, true = written("triton"), [], artifact.sha256

    def sha256(file: Path) -> str:
        seen.append(str(file.relative_to(folder)))
        return true(file)

    monkeypatch.setattr(artifact, "sha256", sha256)
    runtime.load(folder, device="cpu", verify=True)
    assert sorted(seen) == sorted(manifest_of(folder)["files"])


def test_inspect_compares_too(exported: Callable[[str], Path], made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported("huggingface")
    assert main(["inspect", str(folder), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified_files"] == len(manifest_of(folder)["files"])
    flip(folder / "tokenizer.json")
    assert main(["inspect", str(folder), "--verify"]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    assert main(["inspect", str(made("dense")), "--verify"]) == 2


# ---------------------------------------------------------------- whose file
UNRELATED = {
    "object": '{"version": 3, "format": "json"}',
    "alike": '{"schema_version": "draft-7", "target": "web", "files": ["a.js"]}',
    "list": "[1, 2]",
    "broken": '{"half": ',
    "binary": "\0\1\2",
    "empty": "",
}


@pytest.mark.parametrize("content", UNRELATED.values(), ids=UNRELATED)
@pytest.mark.parametrize("kind", ["dense", "w4_g128"])
def test_an_unrelated_file_of_that_name_changes_nothing(made: Make, tmp_path: Path, kind: str, content: str) -> None:
    expected = tokens(made(kind))
    folder = Path(shutil.copytree(made(kind), tmp_path / "model"))
    (folder / "export.json").write_text(content)
    assert tokens(folder) == expected
    assert find_export(folder) is None
    if kind == "dense":
        with pytest.raises(ArtifactError, match=r"no compress\.json"):
            runtime.load(folder, verify=True)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], r"export\.json is no valid JSON"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 99'), "newer version"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": null'), "schema_version must be"),
        (lambda text: text.replace('"files"', '"file"'), "files"),
        (lambda text: text.replace('"sha256"', '"sha"'), "SHA-256"),
        (lambda text: text.replace('"compress-export"', '"?"').replace('"files"', '"file"'), "files"),
    ],
    ids=["cut", "newer", "version", "files", "hashes", "unmarked"],
)
def test_a_damaged_one_of_ours_is_said(
    exported: Callable[[str], Path], damage: Callable[[str], str], words: str
) -> None:
    folder = exported("huggingface")
    text = (folder / "export.json").read_text()
    assert damage(text) != text
    (folder / "export.json").write_text(damage(text))
    with pytest.raises(ArtifactError, match=words):
        runtime.load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "\0"])
def test_without_weights_to_load_a_damaged_one_is_said_whatever_it_begins_with(
    exported: Callable[[str], Path], content: str
) -> None:
    folder = exported("onnx")
    (folder / "export.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"export\.json"):
        runtime.load(folder)


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="File name too long"):
        runtime.load(tmp_path / ("x" * 300))


def test_only_our_own_exports_are_replaced(made: Make, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "export.json").write_text('{"files": {}, "mine": true}')
    with pytest.raises(RequestError, match=r"\bout\b"):
        export.export(made("w4_g128"), "huggingface", output, overwrite=True, quiet=True)
    (output / "export.json").write_text('{"format": "compress-export", ')
    with pytest.raises(RequestError, match=r"out\b.*JSON"):
        export.export(made("w4_g128"), "huggingface", output, overwrite=True, quiet=True)
    assert [path.name for path in output.iterdir()] == ["export.json"]


def test_an_export_has_a_plain_cache_where_none_is_asked_for(written: Callable[[str], Path]) -> None:
    whole = written("onnx")
    for off in (None, False, "none", "off"):
        assert tokens(whole, kv_cache=off)
    with pytest.raises(RequestError, match="cache"):
        tokens(whole, kv_cache="kivi")
