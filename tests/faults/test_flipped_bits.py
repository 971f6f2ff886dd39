"""A single bit that flips in any file of an artifact or an export is found by `compress inspect --verify`."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from runs import make_request

import compress
from compress.cli import main
from export import export
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import find_export, verify_files
from runtime.errors import ArtifactError
from runtime.system.self_hash import json_is_whole, page_is_whole, sealed_json, sealed_page

FLIPS = 1000 * int(os.environ.get("FAULTS_MORE") or 1)
# Not of the artifact: times, and what is chosen anew on every machine.
LEFT_OUT = ("compress.log", "run.json", "drafter.json")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft, so that there are files below it."""
    room = tmp_path_factory.mktemp("artifact")
    return compress.apply(make_request(room, "draft"), output=room / "out", quiet=True).path


@pytest.fixture(scope="module")
def exported(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(artifact, "huggingface", tmp_path_factory.mktemp("export") / "out", verify=False, quiet=True).path


def check(path: Path) -> int:
    return verify_files(Artifact(path), find_export(path))


def not_found(path: Path, flips: int) -> list[str]:
    """Flip a bit, see whether it is found, and flip it back; as often in small files as in large ones."""
    seed = int(os.environ.get("FAULTS_SEED") or time.time_ns())
    print(f"FAULTS_SEED={seed} repeats these flips")
    chooser, missed = random.Random(seed), []
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.name not in LEFT_OUT and f.stat().st_size]
    for flip in range(flips):
        file = files[flip % len(files)]
        place, bit = chooser.randrange(file.stat().st_size), 1 << chooser.randrange(8)
        with file.open("r+b") as stream:
            stream.seek(place)
            before = stream.read(1)
            stream.seek(place)
            stream.write(bytes([before[0] ^ bit]))
            stream.flush()
            try:
                check(path)
                missed.append(f"{file.relative_to(path)}: byte {place}, bit {bit}")
            except ArtifactError:
                pass
            stream.seek(place)
            stream.write(before)
    check(path)
    return missed


@pytest.mark.slow
def test_in_an_artifact(artifact: Path) -> None:
    names = {f.relative_to(artifact).as_posix() for f in artifact.rglob("*") if f.is_file()}
    wanted = {"compress.json", "config.json", "tokenizer.json", "recipe.yaml", "report.html", "draft/draft.json"}
    assert wanted <= names
    (artifact / "README.md").unlink()  # people edit the card, so nothing holds its hash
    assert not_found(artifact, FLIPS) == []


def test_in_an_export(exported: Path) -> None:
    assert {"export.json", "README.md"} <= {f.name for f in exported.iterdir()}
    assert not_found(exported, FLIPS // 3) == []


def test_everywhere_in_what_seals_itself() -> None:
    """Every bit of a small one, also those of the digest and of its name."""
    for raw, whole in (
        (sealed_json({"a": 1.5e10, "b": ["é", None]}).encode(), json_is_whole),
        (sealed_page("<html>\n</html>\n").encode(), page_is_whole),
    ):
        assert whole(raw)
        assert not whole(b"")
        assert not whole(raw[:-1])
        for place in range(len(raw)):
            for bit in range(8):
                flipped = bytearray(raw)
                flipped[place] ^= 1 << bit
                assert not whole(bytes(flipped)), (place, bit)


def test_a_manifest_can_be_sealed_again() -> None:
    text = sealed_json({"b": 1, "a": 2})
    assert sealed_json(json.loads(text)) == text
    assert json_is_whole(sealed_json(json.loads(text) | {"b": 2}).encode())


def test_the_command_says_which_file(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact), "--verify"]) == 0
    capsys.readouterr()
    for name in ("compress.json", "report.html"):
        before = (artifact / name).read_text()
        (artifact / name).write_text(before.replace("rtn", "rtm", 1))
        try:
            assert main(["inspect", str(artifact), "--verify"]) == 1
        finally:
            (artifact / name).write_text(before)
        assert f"content differs from its SHA-256: {name}" in capsys.readouterr().err


def test_a_manifest_of_an_earlier_version_still_loads(artifact: Path) -> None:
    """It has no digest of itself, and a report without one."""
    before = {name: (artifact / name).read_text() for name in ("compress.json", "report.html")}
    manifest = json.loads(before["compress.json"])
    del manifest["manifest_sha256"]
    try:
        (artifact / "compress.json").write_text(json.dumps(manifest | {"schema_version": 1}))
        (artifact / "report.html").write_text("<html></html>")
        assert Artifact(artifact).verify() == len(manifest["files"])
        (artifact / "compress.json").write_text(json.dumps(manifest))
        with pytest.raises(ArtifactError, match=r"SHA-256: compress\.json, report\.html"):
            Artifact(artifact).verify()
    finally:
        for name, text in before.items():
            (artifact / name).write_text(text)
