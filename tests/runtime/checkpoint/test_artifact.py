"""Artifacts: the manifest is checked, and so is every byte when asked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import llama, save

import runtime
from runtime.checkpoint.artifact import SCHEMA_VERSION, Artifact
from runtime.errors import ArtifactError
from runtime.system.self_hash import sealed_json


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(llama(), tmp_path_factory.mktemp("artifact") / "m", max_shard_size="100KB")
    write_manifest(path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(original, tmp_path / "m"))


def write_manifest(path: Path, **changes: Any) -> None:
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
        if file.name != "compress.json"
    }
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "compress_version": "0.1.0",
        "source": {"path_or_id": "x", "fingerprint": "f", "bytes": 10},
        "tensors": {"a": {"action": "copied"}, "b": {"action": "compressed"}, "c": {"action": "copied"}},
        "metrics": {"perplexity": 3.5},
        "files": files,
        "bytes": {"before": 10, "after": 5},
    }
    (path / "compress.json").write_text(sealed_json({**manifest, **changes}))


def test_an_intact_artifact(path: Path) -> None:
    artifact = Artifact(path)
    assert artifact.verify() == len(list(path.iterdir())) - 1
    assert artifact.config["model_type"] == "llama"
    assert torch.equal(artifact.checkpoint.get("model.norm.weight"), torch.ones(64))
    runtime.load(path, verify=True).generate("cat", max_new_tokens=2)


def test_summary(path: Path) -> None:
    summary = Artifact(path).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["architecture"] == "LlamaForCausalLM"
    assert summary["compressed"] is False
    assert summary["tensor_bytes"] == summary["bytes_by_dtype"]["float32"]
    assert summary["tensor_actions"] == {"copied": 2, "compressed": 1}
    assert summary["metrics"] == {"perplexity": 3.5}
    (path / "compress.json").unlink()
    assert "tensor_actions" not in Artifact(path).summary()


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_one_flipped_bit_is_found_and_the_file_named(path: Path) -> None:
    file = shards(path)[1]
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    Artifact(path)  # not noticed without reading everything
    with pytest.raises(ArtifactError, match=file.name):
        runtime.load(path, verify=True)


def test_missing_different_and_unlisted_files_are_all_named(path: Path) -> None:
    (path / "tokenizer.json").unlink()
    (path / "generation_config.json").write_text("{}")
    manifest = json.loads((path / "compress.json").read_text())
    del manifest["files"][shards(path)[0].name]
    (path / "compress.json").write_text(sealed_json(manifest))
    with pytest.raises(ArtifactError) as caught:
        Artifact(path).verify()
    message = str(caught.value)
    assert "missing: tokenizer.json" in message
    assert "content differs from its SHA-256: generation_config.json" in message
    assert f"not in the manifest: {shards(path)[0].name}" in message


def test_a_newer_schema_is_refused_before_anything_else(path: Path) -> None:
    write_manifest(path, schema_version=SCHEMA_VERSION + 1, compress_version="9.9")
    for file in shards(path):
        file.write_bytes(b"a layout of the future")
    with pytest.raises(ArtifactError, match="schema version 3"):
        runtime.load(path)


SHA = "0" * 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 0}, "schema_version"),
        ({"schema_version": "1"}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"files": []}, "no object 'files'"),
        ({"tensors": None}, "no object 'tensors'"),
        ({"tensors": {"a": {"action": "eaten"}}}, "tensor a needs an action"),
        ({"files": {"../x": {"bytes": 1, "sha256": SHA}}}, "inside the directory"),
        ({"files": {"a/../../x": {"bytes": 1, "sha256": SHA}}}, "inside the directory"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": SHA}}}, "inside the directory"),
        ({"files": {"..\\x": {"bytes": 1, "sha256": SHA}}}, "inside the directory"),
        ({"files": {"C:x": {"bytes": 1, "sha256": SHA}}}, "inside the directory"),
        ({"files": {"x": {"sha256": SHA}}}, "size in bytes"),
        ({"files": {"x": {"bytes": 1, "sha256": "abc"}}}, "64 hexadecimal digits"),
        ({"files": {"x": 3}}, "size in bytes"),
    ],
)
def test_damaged_manifests(path: Path, changes: dict[str, Any], message: str) -> None:
    write_manifest(path, **changes)
    with pytest.raises(ArtifactError, match=message):
        Artifact(path)


def test_a_manifest_that_is_no_json(path: Path) -> None:
    (path / "compress.json").write_text("{'a': 1}")
    with pytest.raises(ArtifactError, match="no valid JSON"):
        Artifact(path)
