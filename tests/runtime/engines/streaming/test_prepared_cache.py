"""Prepared weights on disk: made once, found again, the same model; whatever is wrong with them costs a repack and no more."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import BATCH, SCHEMES, compress, inside_blocks
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import llama

import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.engines import choose
from runtime.engines.blueprint import Blueprint
from runtime.engines.streaming import cache, clear, contents
from runtime.engines.streaming import load as loading
from runtime.engines.streaming.prepared_file import PAGE, PreparedFile, UnusableFileError
from runtime.errors import ArtifactError, RequestError
from runtime.formats.scheme import GridScheme, Scheme
from runtime.system.directories import cache_directory, temporary

REPOSITORY = Path(__file__).parents[4]


def without_cache(path: Path, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "SMALLEST", 1 << 60)
        return runtime.load(path, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_made_once_and_the_same_model(artifacts: dict[str, Path], makes: list[Path], name: str, kernels: str) -> None:
    plain = without_cache(artifacts[name], kernels=kernels)
    assert not makes
    for _ in range(2):
        model = runtime.load(artifacts[name], kernels=kernels)
        assert len(makes) == 1
        assert type(model.engine) is type(plain.engine)
        assert model.explain() == plain.explain()
        assert torch.equal(model.logits(BATCH), plain.logits(BATCH))
        assert model.generate([5, 6, 7], max_new_tokens=6) == plain.generate([5, 6, 7], max_new_tokens=6)
        embedding, head = model.engine.module.get_input_embeddings(), model.engine.module.get_output_embeddings()
        assert embedding.weight is head.weight


@pytest.mark.parametrize("storage", list(SCHEMES))
def test_stored_tensors_come_back(tmp_path: Path, storage: str, makes: list[Path]) -> None:
    weights = compress(llama().bfloat16(), tmp_path / "m", inside_blocks(storage))
    stored = load_file(tmp_path / "m" / "model.safetensors")
    for _ in range(2):
        module = runtime.load(tmp_path / "m").engine.module
        state = module.state_dict()
        for name, tensor in stored.items():
            assert state[name].dtype == tensor.dtype
            assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
        for name, weight in weights.items():
            assert torch.equal(module.get_submodule(name).dequantize(), weight.dequantize())
    assert len(makes) == 1


def test_groups_of_zeros(tmp_path: Path, makes: list[Path], load_streamed: Callable[..., Any]) -> None:
    """Layers without them have as many bytes as they hold, in memory, in the file and streamed."""
    path, scheme = tmp_path / "m", Scheme(GridScheme(4, group_size=32), sparsity="block:32x32")
    weights = compress(
        llama(num_hidden_layers=5), path, lambda name: ("bitmap", scheme) if name.endswith("_proj") else None
    )
    plain = without_cache(path)
    assert set(weights) <= {
        name for name, said in plain.explain().items() if said == "int4-c, groups of zeros left out"
    }
    for load in (runtime.load, runtime.load, lambda path: load_streamed(path, 2)):
        model = load(path)
        assert torch.equal(model.logits(BATCH), plain.logits(BATCH))
        assert model.generate([5, 6, 7], max_new_tokens=6) == plain.generate([5, 6, 7], max_new_tokens=6)
        assert model.explain() == plain.explain()
    assert len(makes) == 1
    model = runtime.load(path)
    for name, weight in weights.items():
        assert torch.equal(model.engine.module.get_submodule(name).dequantize(), weight.dequantize())


def test_dtype_kernels_and_artifact_are_in_the_key(
    artifacts: dict[str, Path], makes: list[Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(artifacts["llama"], tmp_path / "copy")
    for options in ({}, {"dtype": "bfloat16"}, {"kernels": "reference"}, {"dtype": "bfloat16"}):
        model = runtime.load(copy, **options)
        assert torch.equal(model.logits(BATCH), without_cache(copy, **options).logits(BATCH))
    assert len(set(makes)) == len(makes) == 3
    runtime.load(copy, kernels="fast")  # the same layout
    assert len(makes) == 3
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert torch.equal(runtime.load(copy).logits(BATCH), without_cache(copy).logits(BATCH))
    assert len(makes) == 4


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": lambda f: f.write_bytes(f.read_bytes()[:-5000]),
    "longer": lambda f: f.write_bytes(f.read_bytes() + bytes(PAGE)),
    "empty": lambda f: f.write_bytes(b""),
    "header": lambda f: flip(f, 400),
    "no header": lambda f: f.write_bytes(bytes(100_000)),
    "foreign": lambda f: f.write_bytes(next(p for p in f.parents[1].glob("*/*.safetensors") if p != f).read_bytes()),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_files_are_made_again(
    artifacts: dict[str, Path], makes: list[Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = runtime.load(artifacts["llama"]).logits(BATCH)
    runtime.load(artifacts["gpt2"])
    DAMAGES[damage](makes[0])
    with caplog.at_level(logging.WARNING, "compress.cache"):
        assert torch.equal(runtime.load(artifacts["llama"]).logits(BATCH), expected)
    said = [r.getMessage() for r in caplog.records if r.name == "compress.cache"]
    assert [message.startswith("prepared weights are made again") for message in said] == [True]
    assert len(makes) == 3
    runtime.load(artifacts["llama"])
    assert len(makes) == 3


def test_a_flipped_bit_is_found_when_the_artifact_is_verified(artifacts: dict[str, Path], makes: list[Path]) -> None:
    runtime.load(artifacts["llama"])
    key = makes[0].parent.name
    PreparedFile(makes[0], key).verify()
    flip(makes[0], makes[0].stat().st_size - PAGE - 1)
    with pytest.raises(UnusableFileError, match=r"model\.layers\.\d"):
        PreparedFile(makes[0], key).verify()
    for verify in (False, True):
        blueprint = Blueprint(Artifact(artifacts["llama"]), torch.device("cpu"), "auto", None, False)
        assert loading.prepared_file(blueprint, verify).path == makes[0]
        assert len(makes) == 1 + verify


def test_others_may_read_it_as_far_as_the_umask_allows(artifacts: dict[str, Path], makes: list[Path]) -> None:
    before = os.umask(0o027)
    try:
        runtime.load(artifacts["llama"])
    finally:
        os.umask(before)
    assert makes[0].stat().st_mode & 0o777 == 0o640


def test_the_file_is_safetensors_with_groups_on_pages(artifacts: dict[str, Path], makes: list[Path]) -> None:
    model = runtime.load(artifacts["llama"])
    file = PreparedFile(makes[0], makes[0].parent.name)
    assert [g.name for g in file.groups] == ["", *(f"model.layers.{i}" for i in range(5))]
    assert all(g.begin % PAGE == g.end % PAGE == 0 for g in file.groups)
    with safe_open(makes[0], "pt") as stream:
        names = {name for name in stream.keys() if not name.startswith("pad.")}  # noqa: SIM118
        assert names == {name for group in file.groups for name in file.names(group)}
        norm = "model.layers.3.input_layernorm.weight"
        assert torch.equal(stream.get_tensor(norm), model.engine.module.get_parameter(norm))
    for group in file.groups:
        assert all(value.data_ptr() % 64 == 0 for value in file.tensors(group).values() if value.numel())


def test_where_nothing_can_be_written(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = without_cache(artifacts["llama"]).logits(BATCH)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "file"))  # root may write everywhere, but not into a file
    with caplog.at_level(logging.WARNING, "compress.cache"):
        for _ in range(2):
            assert torch.equal(runtime.load(artifacts["llama"]).logits(BATCH), expected)
    assert len([r for r in caplog.records if "laid out anew at every load" in r.getMessage()]) == 1
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(artifacts["llama"], max_memory="1GB")


def test_a_full_disk(artifacts: dict[str, Path], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = without_cache(artifacts["llama"]).logits(BATCH)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.engines.streaming.load.os.replace", full)
    assert torch.equal(runtime.load(artifacts["llama"]).logits(BATCH), expected)
    assert not [p for p in home.glob("*/*") if p.suffix in (".tmp", ".safetensors")]


def test_room_is_made_for_what_is_used(
    artifacts: dict[str, Path], makes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.load(artifacts["llama"])
    runtime.load(artifacts["gpt2"])
    for age, file in enumerate(makes):
        os.utime(file, (10**9 + age, 10**9 + age))
    runtime.load(artifacts["llama"])  # used last now
    assert [kept.source for kept in contents()] == [str(artifacts["llama"]), str(artifacts["gpt2"])]
    left = makes[0].parent / "x.tmp"
    left.write_text("")
    os.utime(left, (10**9, 10**9))
    monkeypatch.setattr(cache, "MOST_BYTES", makes[0].stat().st_size + makes[1].stat().st_size + 1)
    runtime.load(artifacts["llama"], dtype="bfloat16")
    assert not makes[1].exists()
    assert not left.exists()
    model = runtime.load(artifacts["llama"])
    assert clear() > 0
    assert contents() == []
    assert len(model.generate([5, 6], max_new_tokens=3)) == 3  # what is mapped stays


@pytest.mark.parametrize("guess", [False, True])
def test_what_is_larger_than_the_cache_is_not_kept(
    artifacts: dict[str, Path], makes: list[Path], home: Path, monkeypatch: pytest.MonkeyPatch, guess: bool
) -> None:
    runtime.load(artifacts["gpt2"])
    monkeypatch.setattr(cache, "MOST_BYTES", 1000)
    if not guess:  # found out when it is there
        monkeypatch.setattr(loading, "group_bytes", lambda *_: {"": 0})
    model = runtime.load(artifacts["llama"])
    assert torch.equal(model.logits(BATCH), without_cache(artifacts["llama"]).logits(BATCH))
    assert len(makes) == (1 if guess else 2)
    assert not list(home.glob("*/*.tmp"))
    streamed = runtime.load(artifacts["gpt2"], max_memory="1GB", dtype="bfloat16")  # cannot do without
    assert [kept.source for kept in contents()] == [str(artifacts["gpt2"])]
    assert torch.equal(streamed.logits(BATCH), without_cache(artifacts["gpt2"], dtype="bfloat16").logits(BATCH))


def test_without_a_home_directory(
    artifacts: dict[str, Path], makes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("COMPRESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    for kind in ("native", "tuning", "prepared"):
        place = cache_directory(kind)
        assert place.parent == temporary()
        assert place.parent.stat().st_mode & 0o777 == 0o700
    expected = runtime.load(artifacts["llama"]).logits(BATCH)
    assert not makes
    assert torch.equal(runtime.load(artifacts["llama"], max_memory="1GB").logits(BATCH), expected)
    assert makes[0].is_relative_to(temporary())
    assert clear() > 0


SCRIPT = """
import sys, torch, runtime
from runtime.engines import choose
choose.SMALLEST = 0
torch.set_num_threads(1)
print(runtime.load(sys.argv[1]).generate([5, 6, 7], max_new_tokens=8, ignore_eos=True))
"""


@pytest.mark.slow
def test_two_processes_at_once(artifacts: dict[str, Path], home: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(artifacts["llama"])]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) for _ in range(2)]
    said = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert said[0] == said[1] == runtime.load(artifacts["llama"]).generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    assert len(list(home.glob("*/*.safetensors"))) == len(list(home.glob("*/*.json"))) == 1
    assert not list(home.glob("*/*.tmp"))


def test_a_wrong_artifact_stays_wrong(artifacts: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    compress(llama(), tmp_path / "m", inside_blocks("pack-quantized"))
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = torch.ones(96, 3)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ArtifactError, match="weight_scale"):
        runtime.load(tmp_path / "m")
    assert contents() == []
    with pytest.raises(RequestError, match="referense"):
        runtime.load(artifacts["llama"], kernels="referense")
