"""Reading checkpoint directories: every layout works, nothing damaged or unsafe is accepted."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tensors

from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import read_header
from runtime.errors import ArtifactError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c": torch.arange(9, dtype=torch.int32),
}


def shard(path: Path, index: bool = True) -> Path:
    """Each tensor of TENSORS in a file of its own."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items(), 1):
        weight_map[name] = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensor}, path / weight_map[name])
    if index:
        write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with any header (an object or the bytes themselves)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("layout", ["single", "indexed", "shards without index"])
def test_reads_every_layout(tmp_path: Path, layout: str) -> None:
    path = save_tensors(tmp_path / "m", TENSORS) if layout == "single" else shard(tmp_path / "m", layout == "indexed")
    checkpoint = Checkpoint(path)
    assert checkpoint.names() == sorted(TENSORS)
    assert len(checkpoint.files()) == (1 if layout == "single" else 3)
    assert checkpoint.total_bytes == sum(t.nbytes for t in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        assert checkpoint.nbytes(name) == tensor.nbytes
        read = checkpoint.get(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    assert checkpoint.has("c")
    assert not checkpoint.has("d")
    with pytest.raises(ArtifactError, match="no tensor d"):
        checkpoint.get("d")


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.ones(3, dtype=torch.float32).to(d) for d in (
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
            torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
        )),
        torch.tensor(2.5),
        torch.empty(0, 4),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}",
)  # fmt: skip
def test_reads_what_safetensors_writes(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = save_tensors(tmp_path / "m", {"x": tensor, "y": torch.ones(2)})
    read = Checkpoint(path).get("x")
    expected = load_file(path / "model.safetensors")["x"]
    assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
    assert torch.equal(read.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_a_tensor_is_read_without_the_rest_of_the_file(tmp_path: Path) -> None:
    """64 GiB that lie in a sparse file before the tensor that is asked for."""
    huge = 64 << 30
    header = {"huge": entry("U8", (huge,), (0, huge)), "small": entry(offsets=(huge, huge + 8))}
    path = raw(tmp_path / "m", header)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(0, 2)
        file.seek(huge, 1)
        file.write(torch.tensor([1.0, 2.0]).numpy().tobytes())
    started = time.perf_counter()
    checkpoint = Checkpoint(path)
    assert torch.equal(checkpoint.get("small"), torch.tensor([1.0, 2.0]))
    assert len(checkpoint.fingerprint()) == 64
    assert time.perf_counter() - started < 5


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "m", TENSORS)
    checkpoint = Checkpoint(path)
    checkpoint.get("a.weight").zero_()
    assert torch.equal(checkpoint.get("a.weight"), TENSORS["a.weight"])


DAMAGED_HEADERS = [
    ({"x": entry(dtype="F31")}, b"\0" * 8, "an unknown dtype"),
    ({"x": entry(dtype=7)}, b"\0" * 8, "a dtype that is a number"),
    ({"x": entry(shape=(-2,))}, b"\0" * 8, "a negative extent"),
    ({"x": entry(shape=(True, 2))}, b"\0" * 8, "a boolean extent"),
    ({"x": entry(shape="22")}, b"\0" * 8, "a shape that is a text"),
    ({"x": entry(shape=(3,))}, b"\0" * 8, "too few bytes for the shape"),
    ({"x": entry(shape=(2**62, 2**62), offsets=(0, 8))}, b"\0" * 8, "a shape that overflows"),
    ({"x": entry(offsets=(8, 0))}, b"\0" * 8, "a backward range"),
    ({"x": entry(offsets=(0, 8, 16))}, b"\0" * 8, "three offsets"),
    ({"x": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "no offsets"),
    ({"x": [1]}, b"\0" * 8, "a list for a tensor"),
    ({"x": entry()}, b"\0" * 4, "less data than tensors"),
    ({"x": entry()}, b"\0" * 12, "data behind the last tensor"),
    ({"x": entry(), "y": entry(offsets=(4, 12))}, b"\0" * 12, "tensors that overlap"),
    ({"x": entry(), "y": entry()}, b"\0" * 8, "tensors in one place"),
    ({"x": entry(), "y": entry(offsets=(12, 20))}, b"\0" * 20, "a gap"),
    ({"x": entry(offsets=(2**70, 2**70 + 8))}, b"\0" * 8, "a range beyond the file"),
    (b'{"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "x": {}}', b"\0" * 8, "a name twice"),
    (b"{not json", b"", "no JSON"),
    (b"\xff\xfe\xfd", b"", "no UTF-8"),
    (b"[" * 100_000, b"", "deep nesting"),
    (b"[]", b"", "a list for a header"),
    (b'{"__metadata__": 3}', b"", "metadata that is a number"),
    (b"{}", b"", "no tensor"),
]


@pytest.mark.parametrize(
    ("header", "data"), [case[:2] for case in DAMAGED_HEADERS], ids=[what for *_, what in DAMAGED_HEADERS]
)
def test_damaged_headers_are_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    path = raw(tmp_path / "m", header, data)
    with pytest.raises(ArtifactError) as caught:
        Checkpoint(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("size", [0, 3, 8, 40])
def test_truncated_anywhere(tmp_path: Path, size: int) -> None:
    path = save_tensors(tmp_path / "m", TENSORS)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        Checkpoint(path)


def test_header_length_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "m", TENSORS)
    (path / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        Checkpoint(path)


def test_random_damage_is_an_artifact_error_or_harmless(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "m", TENSORS)
    file = path / "model.safetensors"
    good = file.read_bytes()
    header_end = read_header(file).data_start
    chance = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(header_end)] = chance.choice(b'0123456789"{}[],:xF\x00\xff')
        file.write_bytes(damaged)
        try:
            checkpoint = Checkpoint(path)
        except ArtifactError:
            refused += 1
            continue
        for name in checkpoint.names():
            assert checkpoint.get(name).nbytes == checkpoint.nbytes(name)
    assert refused > 200


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    path = save_tensors(tmp_path / "m", TENSORS)
    checkpoint = Checkpoint(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="ended while tensor"):
        [checkpoint.get(name) for name in checkpoint.names()]
    file.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        checkpoint.get("c")


def test_missing_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    path = shard(tmp_path / "m")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ArtifactError,
        match="model-00002-of-00003",
    ):
        Checkpoint(path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b", "..\\x", "C:\\x", "", "x\0y"])
def test_index_stays_inside_the_directory(tmp_path: Path, name: str) -> None:
    path = shard(tmp_path / "m")
    save_file({"c": TENSORS["c"]}, tmp_path / "outside.safetensors")
    write_index(path, {"c": name})
    with pytest.raises(ArtifactError, match="inside the directory"):
        Checkpoint(path)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"c": 3}, "x"])
def test_index_without_a_usable_map(tmp_path: Path, weight_map: Any) -> None:
    path = shard(tmp_path / "m")
    write_index(path, weight_map)
    with pytest.raises(ArtifactError, match="no weight_map"):
        Checkpoint(path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    path = shard(tmp_path / "m")
    write_index(path, {"d": "model-00001-of-00003.safetensors"})
    with pytest.raises(ArtifactError, match="tensor d is missing"):
        Checkpoint(path)
    (path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ArtifactError, match="no valid JSON"):
        Checkpoint(path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path / "m", index=False)
    save_file({"c": TENSORS["c"]}, path / "more.safetensors")
    with pytest.raises(ArtifactError, match="tensor c"):
        Checkpoint(path)


def test_hub_cache_links_are_followed_and_dangling_ones_refused(tmp_path: Path) -> None:
    blobs = shard(tmp_path / "models--a--b" / "blobs")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert torch.equal(Checkpoint(snapshot).get("c"), TENSORS["c"])
    (blobs / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ArtifactError, match="model-00003-of-00003"):
        Checkpoint(snapshot)
    (snapshot / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match="no regular file"):
        Checkpoint(snapshot)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'echo no'\ntR.")
    with pytest.raises(ArtifactError, match="save_pretrained"):
        Checkpoint(tmp_path)


def test_the_way_out_of_pickle_works(tmp_path: Path) -> None:
    """The snippet in the message, run as it stands."""
    from tiny_models import llama

    model = llama()
    model.config.save_pretrained(tmp_path / "m")
    torch.save(model.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ArtifactError) as caught:
        Checkpoint(tmp_path / "m")
    exec(str(caught.value).split("convert it with: ")[1])
    converted = Checkpoint(tmp_path / "m-safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(converted.get(name), model.state_dict()[name])


def test_directories_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no config\.json$"):
        Checkpoint(tmp_path)
    shard(tmp_path / "inner")
    with pytest.raises(ArtifactError, match="inner"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no weights"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ArtifactError, match="must hold a JSON object"):
        Checkpoint(tmp_path)
    with pytest.raises(ArtifactError, match="file"):
        Checkpoint(tmp_path / "config.json")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ArtifactError, match="git lfs pull"):
        Checkpoint(tmp_path)


def test_a_misspelt_path_names_the_nearest_directory(tmp_path: Path) -> None:
    shard(tmp_path / "models" / "stdlib-4m")
    with pytest.raises(ArtifactError, match="stdlib-4m"):
        Checkpoint(tmp_path / "models" / "stdlb-4m")
    with pytest.raises(ArtifactError, match="models"):
        Checkpoint(tmp_path / "model" / "stdlib-4m")


def test_hub_ids_are_downloaded_without_pickles_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "cache")
    asked: dict[str, Any] = {}

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, patterns=allow_patterns)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert Checkpoint("some-org/some-model").has("c")
    assert asked["repository"] == "some-org/some-model"
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(asked["patterns"])
    # A directory of the organisation's name here means that a local path was meant.
    (tmp_path / "some-org").mkdir()
    with pytest.raises(ArtifactError, match="does not exist"):
        Checkpoint("some-org/some-model")


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host\nlong\ntrace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ArtifactError, match="ConnectionError"):
        Checkpoint("some-org/some-model")


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    path = shard(tmp_path / "m")
    first = Checkpoint(path).fingerprint()
    shutil.copytree(path, tmp_path / "elsewhere")
    assert Checkpoint(tmp_path / "elsewhere").fingerprint() == first

    seen = {first}
    for file, position in (("model-00001-of-00003.safetensors", -1), ("model-00003-of-00003.safetensors", -36)):
        content = bytearray((path / file).read_bytes())
        content[position] ^= 1
        (path / file).write_bytes(content)
        seen.add(Checkpoint(path).fingerprint())
    (path / "config.json").write_text('{"a": 1}')
    seen.add(Checkpoint(path).fingerprint())
    assert len(seen) == 4
