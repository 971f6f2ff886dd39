"""What prepared weights are known by: everything that they depend on, and nothing that a copying tool can make equal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import BATCH

import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines import choose
from runtime.engines.streaming import cache
from runtime.system import processes

WEIGHTS = "model.safetensors"


def key(path: Path) -> str:
    cache.library_facts.cache_clear()
    found = cache.key(Artifact(path), {"device": "cpu"})
    cache.library_facts.cache_clear()
    return found


def changed(path: Path, at: int = -1) -> None:
    """Other numbers, the same size and time."""
    file = path / WEIGHTS
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def normalised(path: Path) -> Path:
    for file in path.iterdir():
        os.utime(file, (10**9, 10**9))
    return path


def test_copies_of_equal_size_and_time(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (shutil.copytree(artifacts["llama"], tmp_path / name) for name in ("first", "second"))
    changed(second)
    for path in (first, second):
        model = runtime.load(normalised(path))
        with monkeypatch.context() as patch:
            patch.setattr(choose, "SMALLEST", 1 << 60)
            assert torch.equal(model.logits(BATCH), runtime.load(path).logits(BATCH))
    assert key(first) != key(second)


@pytest.mark.parametrize("hashed", [0, 64 << 20])
def test_a_file_that_is_replaced(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: int
) -> None:
    monkeypatch.setattr(cache, "HASHED", hashed)
    copy = shutil.copytree(artifacts["llama"], tmp_path / "copy")
    before = key(normalised(copy))
    assert key(copy) == before
    changed(copy)
    assert key(normalised(copy)) != before


def test_what_a_file_holds_counts_even_if_nothing_else_tells(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without inode numbers and times of change."""
    monkeypatch.setattr(cache, "identity", lambda file, status: cache.sha256(file).encode())
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda self: "")
    copy = shutil.copytree(artifacts["llama"], tmp_path / "copy")
    before = key(normalised(copy))
    changed(copy)
    assert key(normalised(copy)) != before


def test_instruction_set_and_sources(artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    known = [key(artifacts["llama"])]
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        known.append(key(artifacts["llama"]))
    read = Path.read_bytes
    for name in ("prepared_file.py", "load.py", "weights.py"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda self, n=name: read(self) + b"#" * (self.name == n))
            known.append(key(artifacts["llama"]))
    assert len(set(known)) == len(known)
    assert key(artifacts["llama"]) == known[0]


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2", "Features\t: fpu avx2"])
def test_flags_of_x86_and_arm(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(self: Path, *_: Any, **__: Any) -> str:
        return f"processor\t: 0\n{line}\nprocessor\t: 1\n"

    monkeypatch.setattr(Path, "read_text", text)
    assert processes.flags.__wrapped__() == {"fpu", "avx2"}
