"""The decoder in C against transformers' own modules, and what it promises: the same bits however the work is cut."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_engines import CPU, ROPE, SHAPES, engines, model_of
from tiny_models import save
from transformers import (
    LlamaForCausalLM,
)

import runtime
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.parts import read_parts
from runtime.engines.native.take_over import take_over
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.system import processes

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


@pytest.fixture(scope="module")
def grouped() -> tuple[TorchEngine, NativeEngine]:
    return engines(model_of("grouped"))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(name: str) -> None:
    plain, lean = engines(model_of(name))
    ids = torch.randint(0, 400, (2, 150))
    expected, found = plain.logits(ids), lean.logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_bits_do_not_depend_on_how_a_text_is_cut(grouped: tuple[TorchEngine, NativeEngine]) -> None:
    _, lean = grouped
    text = torch.randint(0, 400, (150,)).tolist()
    whole = lean.logits(torch.tensor([text]))[0]
    pool, parts = lean.new_pages(3), []
    for start, end in ((0, 1), (1, 64), (64, 70), (70, 71), (71, 150)):
        parts.append(lean.read(pool, [Chunk(text[start:end], start, [2, 0, 1])], every=True))
    assert torch.equal(torch.cat(parts), whole)


def test_bits_do_not_depend_on_neighbours_pages_or_threads(grouped: tuple[TorchEngine, NativeEngine]) -> None:
    _, lean = grouped
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 400, (length,), generator=generator).tolist() for length in (1, 63, 64, 65, 130)]
    alone = []
    for text in texts:
        pool = lean.new_pages(3)
        alone.append(lean.step(pool, [Chunk(text, 0, [0, 1, 2])])[0])
    pages = torch.randperm(20, generator=generator).tolist()
    pool = lean.new_pages(20)
    pieces = [Chunk(text, 0, pages[3 * i : 3 * i + 3]) for i, text in enumerate(texts)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            assert torch.equal(lean.step(pool, pieces), torch.stack(alone))
    finally:
        torch.set_num_threads(before)


def test_a_shared_prefix_needs_its_pages_only_once(grouped: tuple[TorchEngine, NativeEngine]) -> None:
    _, lean = grouped
    prefix = torch.randint(0, 400, (64,)).tolist()
    ends = [[1, 2, 3], [4, 5]]
    pool = lean.new_pages(3)
    lean.step(pool, [Chunk(prefix, 0, [0])])
    shared = lean.step(pool, [Chunk(end, 64, [0, 1 + i]) for i, end in enumerate(ends)])
    for end, found in zip(ends, shared, strict=True):
        own = lean.new_pages(2)
        assert torch.equal(lean.step(own, [Chunk(prefix + end, 0, [0, 1])])[0], found)


def test_what_lies_in_unused_memory_is_never_seen(grouped: tuple[TorchEngine, NativeEngine]) -> None:
    _, lean = grouped
    text = torch.randint(0, 400, (70,)).tolist()
    clean, dirty = lean.new_pages(2), lean.new_pages(2)
    for tensor in dirty.tensors:
        tensor.fill_(float("nan"))
    expected = lean.step(clean, [Chunk(text, 0, [0, 1])])
    assert torch.equal(lean.step(dirty, [Chunk(text, 0, [0, 1])]), expected)


def test_a_nan_in_the_weights_reaches_the_logits() -> None:
    model = model_of("grouped")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    _, lean = engines(model)
    assert torch.isnan(lean.logits(torch.tensor([[1, 2, 3]]))).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype: torch.dtype) -> None:
    model = model_of("grouped").to(dtype)
    exact, _ = engines(copy.deepcopy(model).float())  # the same rounded weights
    plain, lean = engines(model)
    ids = torch.randint(0, 400, (1, 100))
    truth, theirs, ours = (engine.logits(ids) for engine in (exact, plain, lean))
    # Only the cache is rounded in ours, everything in theirs.
    assert float((ours - truth).norm()) <= 1.05 * float((theirs - truth).norm())


def test_logits_of_a_sixteen_bit_model_are_the_modules_where_these_are_faster() -> None:
    plain, lean = engines(model_of("grouped").to(torch.bfloat16))
    ids = torch.randint(0, 400, (1, 100))
    in_c = lean.logits(ids)
    lean.in_memory = True
    assert torch.equal(lean.logits(ids), plain.logits(ids) if processes.multiplies(torch.bfloat16) else in_c)
    assert not torch.equal(in_c, plain.logits(ids))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("grouped", {"hidden_act": "mish"}, "Mish"),
        ("grouped", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}}, "dynamic"),
    ],
)
def test_what_it_does_not_know_it_leaves_alone(name: str, changes: dict[str, Any], word: str) -> None:
    model = model_of(name, **changes)
    reason = read_parts(model, CPU)
    assert isinstance(reason, str)
    assert word in reason
    assert take_over(TorchEngine(model, CPU)) is None


def test_a_class_of_the_same_name_is_not_taken_for_transformers_own() -> None:
    model = model_of("grouped")
    model.__class__ = type("LlamaForCausalLM", (LlamaForCausalLM,), {})  # may compute anything
    assert take_over(TorchEngine(model, CPU)) is None


def test_an_unknown_part_is_not_passed_over() -> None:
    model = model_of("grouped")
    model.model.layers[2].self_attn.extra = torch.nn.Linear(2, 2)
    reason = read_parts(model, CPU)
    assert isinstance(reason, str)
    assert "extra" in reason


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit Llama, its head and embedding dense; 2:4 in the feed-forward half."""
    import compress

    folder = tmp_path_factory.mktemp("lean")
    source = save(model_of("grouped", hidden_size=128, intermediate_size=256).to(torch.bfloat16), folder / "source")
    recipe = folder / "recipe.json"
    stages = [
        {"prune": {"method": "magnitude", "pattern": "2:4", "targets": ["*mlp*"]}},
        {"quantize": {"method": "rtn", "bits": 4, "group_size": 64}},
    ]
    recipe.write_text(json.dumps({"name": "lean", "model": str(source), "stages": stages}))
    return Path(compress.apply(str(recipe), output=str(folder / "out")).path)


def unrounded(artifact: Path) -> TorchEngine:
    """The artifact in float32 with dense weights code * scale (the reference rounds them to the scale's bfloat16)."""
    engine = runtime.load(artifact, kernels="reference", dtype="float32").engine
    assert isinstance(engine, TorchEngine)
    for name, layer in list(engine.module.named_modules()):
        if isinstance(layer, CompressedLinear):
            weight = layer.compressed_weight()
            assert weight.scale is not None
            dense = layer.dense()
            wide = dataclasses.replace(weight, scale=weight.scale.float(), dtype=torch.float32)
            dense.weight.data = wide.dequantize()
            engine.module.set_submodule(name, dense)
    return engine


def test_a_compressed_model_runs_in_c_with_the_references_numbers(artifact: Path) -> None:
    lean = runtime.load(artifact)
    assert isinstance(lean.engine, NativeEngine)
    assert not lean.engine.lockstep
    assert "C" in lean.stats["engine"]
    assert set(lean.explain().values()) >= {"int4-c"}
    ids = torch.randint(0, 400, (2, 80))
    truth = unrounded(artifact).forward(ids, None, None, None)
    assert float((lean.logits(ids) - truth).norm() / truth.norm()) < 0.02  # a bfloat16 cache
    precise = runtime.load(artifact, dtype="float32")
    assert float((precise.logits(ids) - truth).norm() / truth.norm()) < 1e-5
    fast = runtime.load(artifact, kernels="fast")
    assert isinstance(fast.engine, NativeEngine)
    error = float((fast.logits(ids) - truth).norm() / truth.norm())
    assert 0.001 < error < 0.1  # int8 activations: seen in the numbers, and small


def test_one_prompt_or_many_the_tokens_are_the_same(artifact: Path) -> None:
    model = runtime.load(artifact)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(2, 400, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 90, (12,), generator=generator)
    ]
    together = model.generate(prompts, max_new_tokens=12, ignore_eos=True)
    assert together == [model.generate(prompt, max_new_tokens=12, ignore_eos=True) for prompt in prompts]
