"""Parts of stored tensors: the right numbers, and no more read than that takes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError

TENSORS = {
    "vector": torch.randn(37),
    "matrix": torch.randn(61, 53).to(torch.bfloat16),
    "wide": torch.randint(-9, 9, (12, 40_000), dtype=torch.int32),
    "tall": torch.randn(40_000, 12).to(torch.float8_e4m3fn),
    "cube": torch.randn(9, 3, 5),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("parts")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(TENSORS, path / "model.safetensors")
    return Checkpoint(path)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_any_part(name: str, checkpoint: Checkpoint) -> None:
    whole, seed = TENSORS[name], random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(30):
        bounds = [sorted(draw.choices(range(size + 1), k=2)) for size in whole.shape]
        index = [slice(*each) if draw.random() < 0.7 else slice(None) for each in bounds]
        found = checkpoint.get_part(name, index)
        wanted = whole[tuple(index)]
        assert found.shape == wanted.shape
        assert found.dtype == wanted.dtype
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes, "it keeps memory of what is not in it"
        if found.numel():
            assert torch.equal(bytes_of(found), bytes_of(wanted))


def read_by(call: Callable[[], object]) -> int:
    """Bytes that this process reads meanwhile; the least of a few tries, since other threads (those of pytest-xdist) read too."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

    def during(call: Callable[[], object]) -> int:
        before = so_far()
        call()
        return so_far() - before

    between = min(during(lambda: None) for _ in range(5))  # reading that file counts too
    return min(during(call) for _ in range(5)) - between


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="needs /proc/self/io, which counts the bytes that a process has read"
)
@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("wide", (slice(None), slice(20_000, 40_000))),
        ("wide", (slice(3, 6), slice(None))),
        ("wide", (slice(6, 12), slice(0, 10_000))),
        ("tall", (slice(100, 20_100), slice(None))),
        ("vector", (slice(30, 37),)),
    ],
)
def test_what_is_read(name: str, index: tuple[slice, ...], checkpoint: Checkpoint) -> None:
    part = TENSORS[name][index].nbytes
    assert part <= read_by(lambda: checkpoint.get_part(name, index)) <= part + 1000
    assert read_by(lambda: checkpoint.get(name)) >= TENSORS[name].nbytes


def test_short_rows_are_read_whole(checkpoint: Checkpoint) -> None:
    """12 columns of a byte each: the disk reads all of them anyway, and a call for each row would take longer."""
    assert torch.equal(
        bytes_of(checkpoint.get_part("tall", (slice(None), slice(6, 12)))), bytes_of(TENSORS["tall"][:, 6:])
    )


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"wide": TENSORS["wide"]}, tmp_path / "model.safetensors")
    opened = Checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate((tmp_path / "model.safetensors").stat().st_size - 10_000)
    opened.get_part("wide", (slice(0, 6), slice(None)))
    with pytest.raises(ArtifactError, match="truncated"):
        opened.get_part("wide", (slice(None), slice(20_000, None)))
