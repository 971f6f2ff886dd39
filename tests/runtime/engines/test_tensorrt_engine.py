"""The TensorRT engine on the stand-in: buffers that alternate, profiles, refusals; tokens are those of the torch engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_tensorrt.install import HostGpu, install

import runtime
import runtime.engines.tensorrt.engine as engines
from runtime.engines.base import EngineOptions
from runtime.engines.tensorrt.engine import load_tensorrt
from runtime.errors import ArtifactError, CompressError, RequestError

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

BATCH, LENGTH, PROMPT = 3, 48, 7
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20], [30, 31, 32], [40, 41], list(range(50, 70))]


@pytest.fixture(scope="module")
def checkpoint(tiny_llama: Callable[..., Path]) -> Path:
    # Of the size that the tests of exports use, so that tracing it is remembered.
    return tiny_llama(hidden_size=128, intermediate_size=256, num_hidden_layers=2)


@pytest.fixture(scope="module")
def exports(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`exports(weight_streaming=True)`: directory of an engine in float32, built once."""
    import export

    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = repr(options)
        if key not in made:
            out = tmp_path_factory.mktemp("engine") / "engine"
            with pytest.MonkeyPatch.context() as patch:
                install(patch)
                export.export(
                    checkpoint, "tensorrt", out, quiet=True, verify=False, dtype="float32",
                    max_batch=BATCH, max_length=LENGTH, max_prompt=PROMPT, optimum_prompt=4, **options,
                )  # fmt: skip
            made[key] = out
        return made[key]

    return make


@pytest.fixture
def model(exports: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch)
    return runtime.load(exports(), device="cpu")


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Any:
    return runtime.load(checkpoint, device="cpu", dtype="float32")


# ---------------------------------------------------------------- the same tokens
def test_generates_the_same_tokens_as_torch(model: Any, truth: Any) -> None:
    """Five ragged prompts, two parts of at most three rows, one prompt longer than a prefill step; rows end at different times."""
    expected = truth.generate(PROMPTS, max_new_tokens=12)
    assert model.generate(PROMPTS, max_new_tokens=12) == expected
    assert model.stats["cache_bytes"] > 0


def test_streams_and_scores_like_torch(model: Any, truth: Any) -> None:
    assert list(model.stream(PROMPTS[0], max_new_tokens=9)) == truth.generate(PROMPTS[0], max_new_tokens=9)
    text = list(range(3, 40))
    assert model.score(text).log_likelihood == pytest.approx(truth.score(text).log_likelihood, abs=1e-3)


def test_logits_of_every_position(model: Any, truth: Any) -> None:
    ids = torch.arange(4 * 19).view(4, 19) % 257
    found = model.logits(ids)
    assert found.dtype == torch.float32
    assert torch.allclose(found, truth.logits(ids), atol=2e-4)


def test_a_padded_batch_goes_on_where_it_was(model: Any, truth: Any) -> None:
    """Rows of different lengths, several tokens after a past: every row as it would be alone."""
    first = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 0, 0, 0, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    second, later = torch.tensor([[8, 9], [7, 8], [0, 10]]), torch.tensor([[1, 1], [1, 1], [1, 1]])
    cache, both = model.engine.new_cache(), torch.cat([mask, later], 1)
    places = (both.cumsum(1) - 1).clamp(min=0)
    model.engine.forward(first, cache, mask, places[:, :5])
    found = model.engine.forward(second, cache, both, places[:, 5:])
    assert cache.length == 7
    for row, ids in enumerate([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 7, 8], [9, 0, 10]]):
        assert torch.allclose(found[row], truth.logits([ids])[0, -2:], atol=2e-4)


# ---------------------------------------------------------------- cache
def test_rows_are_kept_in_any_order(model: Any, truth: Any) -> None:
    engine = model.engine
    cache = engine.new_cache()
    ids = torch.arange(5 * 6).view(5, 6) + 3
    engine.forward(ids, cache, None, None)
    before = engine.cache_bytes(cache)
    engine.keep_rows(cache, torch.tensor([4, 0, 3]))
    assert engine.cache_bytes(cache) < before
    assert cache.rows == 3
    found = engine.forward(torch.tensor([[7], [8], [9]]), cache, None, torch.full((3, 1), 6), True)
    for row, (old, new) in enumerate([(4, 7), (0, 8), (3, 9)]):
        alone = truth.logits([[*ids[old].tolist(), new]])[0, -1]
        assert torch.allclose(found[row, 0], alone, atol=2e-4)


def test_two_caches_do_not_disturb_each_other(model: Any, truth: Any) -> None:
    engine = model.engine
    texts = [[5, 6, 7], [90, 91, 92, 93]]
    caches = [engine.new_cache() for _ in texts]
    logits = [engine.forward(torch.tensor([t]), c, None, None, True) for t, c in zip(texts, caches, strict=True)]
    for _ in range(8):
        for i, cache in enumerate(caches):
            token = int(logits[i][0, -1].argmax())
            texts[i].append(token)
            logits[i] = engine.forward(torch.tensor([[token]]), cache, None, None, True)
    for text, start in zip(texts, (3, 4), strict=True):
        assert text[start:] == truth.generate(text[:start], max_new_tokens=8, ignore_eos=True)


# ---------------------------------------------------------------- limits and refusals
def test_more_than_the_engine_was_built_for_is_refused(model: Any) -> None:
    with pytest.raises(RequestError, match=rf"\b{LENGTH}\b"):
        model.generate(list(range(3, 3 + LENGTH + 1)), max_new_tokens=1)
    engine, cache = model.engine, model.engine.new_cache()
    engine.forward(torch.arange(LENGTH)[None], cache, None, None, True)
    with pytest.raises(RequestError, match=rf"\b{LENGTH}\b.*max_length"):
        engine.forward(torch.tensor([[1]]), cache, None, None, True)


def test_a_shape_outside_the_profile_is_said(exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    session = runtime.load(exports(), device="cpu").engine.session
    with pytest.raises(CompressError, match=r"input_ids.*\[1, 8\]"):
        session.run(0, {"input_ids": torch.zeros(1, PROMPT + 1, dtype=torch.int64)}, {})


def test_options_that_are_fixed_are_refused(exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(RequestError, match="max_memory"):
        runtime.load(exports(), device="cpu", max_memory="1GB")
    with pytest.raises(RequestError, match=r"\bdtype\b"):
        runtime.load(exports(), device="cpu", dtype="float16")
    with pytest.raises(RequestError, match=r"\bkernels\b"):
        runtime.load(exports(), device="cpu", kernels="reference")


def test_weight_streaming_takes_a_budget(exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    path = exports(weight_streaming=True)
    assert runtime.load(path, device="cpu").engine.session.engine.weight_streaming_budget_v2 == 4321
    bounded = runtime.load(path, device="cpu", max_memory=(64 << 20) + 4096 + 1000)
    assert bounded.engine.session.engine.weight_streaming_budget_v2 == 1000
    with pytest.raises(RequestError, match=r"max_memory.*\b1000000\b"):
        runtime.load(path, device="cpu", max_memory=1000000)


def test_another_version_or_gpu_is_refused(exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trt: Any = install(monkeypatch)
    path = exports()
    trt.__version__ = "11.9.0"
    with pytest.raises(ArtifactError, match=r"11\.4\..*11\.9\.0"):
        runtime.load(path, device="cpu")
    install(monkeypatch)
    monkeypatch.setattr(HostGpu, "capability", (8, 6))
    with pytest.raises(ArtifactError, match=r"9\.0.*8\.6"):
        runtime.load(path, device="cpu")


def test_an_engine_of_tensorrts_own_layers_is_refused(exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    facts = runtime.load(exports(), device="cpu").artifact.facts
    with pytest.raises(ArtifactError, match="export it again"):
        load_tensorrt(
            SimpleNamespace(path=exports(), facts={**facts, "network": "native"}), torch.device("cpu"), EngineOptions()
        )


def test_a_damaged_plan_is_refused(exports: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    facts = runtime.load(exports(), device="cpu").artifact.facts
    (tmp_path / "engine.plan").write_bytes(b"nonsense")
    with pytest.raises(ArtifactError, match=r"engine\.plan"):
        load_tensorrt(SimpleNamespace(path=tmp_path, facts=facts), torch.device("cpu"), EngineOptions())
    (tmp_path / "engine.plan").unlink()
    with pytest.raises(ArtifactError, match=r"engine\.plan"):
        load_tensorrt(SimpleNamespace(path=tmp_path, facts=facts), torch.device("cpu"), EngineOptions())


def test_without_a_gpu_it_says_so(exports: Any) -> None:
    with pytest.raises(RequestError, match=r"\bcpu\b"):
        runtime.load(exports(), device="cpu")


def test_without_tensorrt_it_says_what_to_install(exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "make_gpu", lambda device: HostGpu())
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"tensorrt.*pip install"):
        runtime.load(exports(), device="cpu")
