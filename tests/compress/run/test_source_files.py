"""A source that changes in the midst of a run, where a fingerprint of samples does not see it."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress.core.files import sha256
from compress.core.run_directory import RunDirectory
from compress.run import source_files
from compress.run.source_files import SOURCE_SUMS, check_source_files, source_files_checked
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a": torch.randn(1 << 20)}, path / "model.safetensors")  # 4 MB, of which a fingerprint reads a quarter
    return path


def flip(file: Path, place: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


def test_a_byte_between_the_samples_is_seen(model: Path, tmp_path: Path) -> None:
    check_source_files(tmp_path, Checkpoint(model))
    before = Checkpoint(model).fingerprint()
    file = model / "model.safetensors"
    place = 100_000
    while True:  # until one is found that the samples leave out
        flip(file, place)
        if Checkpoint(model).fingerprint() == before:
            break
        flip(file, place)
        place += 10_007
    with pytest.raises(RequestError, match=r"model\.safetensors"):
        check_source_files(tmp_path, Checkpoint(model))
    flip(file, place)
    check_source_files(tmp_path, Checkpoint(model))


def test_times_alone_decide_nothing(model: Path, tmp_path: Path) -> None:
    check_source_files(tmp_path, Checkpoint(model))
    for file in model.iterdir():
        os.utime(file, (0, 0))
    check_source_files(tmp_path, Checkpoint(model))


def test_files_that_look_the_same_are_not_read_again(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    read: list[Path] = []
    monkeypatch.setattr(source_files, "sha256", lambda file, *stop: read.append(file) or sha256(file, *stop))
    check_source_files(tmp_path, Checkpoint(model))
    check_source_files(tmp_path, Checkpoint(model))
    assert sorted(file.name for file in read) == ["config.json", "model.safetensors"]


def test_a_damaged_note_is_made_again(model: Path, tmp_path: Path) -> None:
    check_source_files(tmp_path, Checkpoint(model))
    note = (tmp_path / SOURCE_SUMS).read_bytes()
    flip(tmp_path / SOURCE_SUMS, 40)
    check_source_files(tmp_path, Checkpoint(model))
    assert (tmp_path / SOURCE_SUMS).read_bytes() == note


def claimed(path: Path) -> RunDirectory:
    directory = RunDirectory(path / "out", resume=True)
    directory.inspect({})
    directory.path.mkdir(exist_ok=True)
    directory.claim()
    return directory


def test_no_part_is_recorded_before_the_note(model: Path, tmp_path: Path) -> None:
    directory = claimed(tmp_path)
    with source_files_checked(directory, Checkpoint(model)):
        directory.commit("block-00000", {})
        assert (directory.work / SOURCE_SUMS).is_file()
    (model / "config.json").write_text("{} ")
    with (
        pytest.raises(RequestError, match=r"config\.json"),
        source_files_checked(claimed(tmp_path), Checkpoint(model)),
    ):
        raise AssertionError("the run has begun")


def test_a_run_that_fails_does_not_wait(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Hashing ends in the midst of a file, and notes nothing."""

    def hashed(_file: Path, stop: Any) -> str:
        assert stop.wait(60)
        raise CompressError("stopped")

    monkeypatch.setattr(source_files, "sha256", hashed)
    directory = claimed(tmp_path)
    with pytest.raises(ZeroDivisionError), source_files_checked(directory, Checkpoint(model)):
        raise ZeroDivisionError
    assert not (directory.work / SOURCE_SUMS).exists()


def test_hashing_stops_when_it_is_told(model: Path) -> None:
    stop = Event()
    assert sha256(model / "config.json", stop) == sha256(model / "config.json")
    stop.set()
    with pytest.raises(CompressError):
        sha256(model / "model.safetensors", stop)
