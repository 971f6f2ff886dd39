"""`runtime.load` of ONNX exports: the same calls as an artifact, the same tokens, and clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import export
import runtime
from runtime.errors import ArtifactError, RequestError

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module", params=[False, True], ids=["standard", "ort"])
def pair(
    request: pytest.FixtureRequest, made: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An artifact and its export."""
    output = tmp_path_factory.mktemp("onnx") / "out"
    export.export(made("w4_g128"), "onnx", output, ort=request.param, quiet=True)
    return made("w4_g128"), output


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def test_64_prompts_give_the_artifacts_tokens(pair: tuple[Path, Path]) -> None:
    artifact, exported = (
        runtime.load(path, **options) for path, options in zip(pair, ({"dtype": "float32"}, {}), strict=True)
    )
    asked = prompts(64)
    wanted = artifact.generate(asked, max_new_tokens=16, ignore_eos=True)
    assert exported.generate(asked, max_new_tokens=16, ignore_eos=True) == wanted
    assert [exported.generate(prompt, max_new_tokens=16, ignore_eos=True) for prompt in asked[:8]] == wanted[:8]
    assert list(exported.stream(asked[0], max_new_tokens=16, ignore_eos=True)) == wanted[0]
    assert exported.stats["new_tokens"] == 16
    text = exported.generate("line 3: the", max_new_tokens=8)
    assert text == artifact.generate("line 3: the", max_new_tokens=8)


def test_logits_and_scores(pair: tuple[Path, Path]) -> None:
    artifact, exported = runtime.load(pair[0], dtype="float32"), runtime.load(pair[1])
    ids = torch.tensor(prompts(1, seed=3)[0] * 3)[None].repeat(3, 1)
    assert torch.allclose(exported.logits(ids), artifact.logits(ids), atol=1e-4)
    row = ids[0].tolist()
    assert exported.score(row).log_likelihood == pytest.approx(artifact.score(row).log_likelihood, rel=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 12, [12], [5, 1, 6], [1, 11]])
def test_a_text_in_pieces_gives_the_logits_of_the_whole(pair: tuple[Path, Path], chunks: list[int]) -> None:
    """Pieces of any lengths after a past of any length, 0 included, in a batch with padding; then a row leaves."""
    engine = runtime.load(pair[1]).engine
    ids = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = engine.forward(ids, None, mask, positions)
    cache, start, found = engine.new_cache(), 0, []
    for length in chunks:
        part = slice(start, start + length)
        found.append(engine.forward(ids[:, part], cache, mask[:, : start + length], positions[:, part]))
        start += length
    kept = mask.bool()
    assert torch.allclose(torch.cat(found, 1)[kept], whole[kept], atol=1e-4)
    assert engine.cache_bytes(cache) > 0
    engine.keep_rows(cache, torch.tensor([2, 0]))
    after = engine.forward(ids[[2, 0], :1], cache, None, None)
    alone = [
        engine.forward(torch.cat([ids[i : i + 1], ids[i : i + 1, :1]], 1), None, None, None)[:, -1:] for i in (2, 0)
    ]
    assert torch.allclose(after, torch.cat(alone), atol=1e-4)


def test_long_prompts_go_through_in_parts(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.engines import past_present

    engine = runtime.load(pair[1]).engine
    ids = torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(2))
    whole = engine.forward(ids, engine.new_cache(), None, None)
    monkeypatch.setattr(past_present, "LOGITS_BYTES", 4 * engine.vocab_size * 16)  # 16 positions at a time
    cache = engine.new_cache()
    assert torch.allclose(engine.forward(ids, cache, None, None), whole, atol=1e-4)
    alone = engine.new_cache()
    assert torch.allclose(engine.forward(ids[:1], alone, None, None), whole[:1], atol=1e-4)
    assert alone.length == cache.length == 40
    last = engine.forward(ids, engine.new_cache(), None, None, last_only=True)
    assert torch.allclose(last, whole[:, -1:], atol=1e-4)


def test_fast_rounds_activations_and_stays_near(pair: tuple[Path, Path]) -> None:
    exact, fast = runtime.load(pair[1]), runtime.load(pair[1], kernels="fast")
    ids = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(5))
    a, b = exact.logits(ids), fast.logits(ids)
    assert not torch.equal(a, b)
    assert (a.log_softmax(-1).exp() * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1).mean() < 0.05
    assert "int8" in fast.stats["engine"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kernels": "dense-tiles"}, "auto, fast or reference"),
        ({"dtype": "bfloat16"}, "export it again"),
        ({"max_memory": "1GB"}, "max_memory"),
        ({"device": "meta"}, "device meta"),
    ],
)
def test_options_it_does_not_take(pair: tuple[Path, Path], options: dict[str, str], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        runtime.load(pair[1], **options)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema_version": 99}, "newer version"),
        ({"schema_version": "1"}, "schema_version"),
        ({"files": []}, "files"),
        ({"target": "gguf"}, "its own engine runs"),
        ({"onnx": None}, "no object 'onnx'"),
        ({"onnx": {"kind": "something"}}, "something"),
        ({"files": {"../config.json": {"bytes": 1, "sha256": "0" * 64}}}, "inside the directory"),
    ],
)
def test_a_manifest_that_is_wrong(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, object], word: str
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "out")
    manifest = json.loads((folder / "export.json").read_text()) | change
    (folder / "export.json").write_text(json.dumps(manifest))
    with pytest.raises((ArtifactError, RequestError), match=word):
        runtime.load(folder)


def test_a_flipped_bit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "out")
    data = bytearray((folder / "model.onnx.data").read_bytes())
    data[len(data) // 2] ^= 4
    (folder / "model.onnx.data").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.onnx\.data"):
        runtime.load(folder)


def test_a_graph_that_is_cut_off(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "out")
    graph = folder / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"\.onnx"):
        runtime.load(folder, verify=False)


def test_weights_lie_in_the_file_as_compressed_as_in_the_artifact(pair: tuple[Path, Path]) -> None:
    from runtime.checkpoint.artifact import Artifact

    stored = Artifact(pair[0]).checkpoint.total_bytes
    assert (pair[1] / "model.onnx.data").stat().st_size < 1.1 * stored
