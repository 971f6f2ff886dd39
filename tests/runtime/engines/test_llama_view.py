"""Parts of the decoder in C against transformers' modules with the same parts taken out."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from inside_cases import adapter, gentle, lean, loaded
from llama_engines import SHAPES, engines
from safetensors.torch import load_file
from without_halves import without

from runtime.engines.base import Chunk
from runtime.engines.native.recorder import Recorder
from runtime.engines.native.sublayers import Adapter, View
from runtime.errors import ArtifactError
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


def ids(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(400) for _ in range(length)]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_skipped_halves_are_as_good_as_gone(name: str) -> None:
    module = gentle(name, 1.0)
    engine = engines(module)[1]
    text, draw = ids(100), random.Random(name)
    for _ in range(3):
        attention, mlp = (draw.sample(range(4), draw.randrange(5)) for _ in range(2))
        with torch.no_grad():
            expected = without(copy.deepcopy(module), attention, mlp)(torch.tensor([text]), use_cache=False).logits[0]
        view = View(engine, range(4), attention, mlp)
        pool, pages = engine.new_pages(3), [2, 0]
        found = view.read(pool, [Chunk(text[:70], 0, pages)])
        assert close(found[0], expected[69])
        assert close(view.read(pool, [Chunk(text[70:], 70, pages)])[0], expected[99])


@pytest.mark.parametrize("name", ["grouped", "tied", "qwen3", "mistral, window", "qwen2, some windows"])
def test_first_layers_by_themselves(name: str) -> None:
    module = gentle(name, 1.0)
    engine = engines(module)[1]
    text = ids(90)
    with torch.no_grad():
        out = module(torch.tensor([text]), use_cache=False, output_hidden_states=True)
        head = module.get_output_embeddings()
        for count in (1, 3):
            view, pool = View(engine, range(count)), engine.new_pages(2)
            states = view.states(pool, [Chunk(text, 0, [0, 1])])
            assert close(states, out.hidden_states[count][0])
            expected = head(module.model.norm(out.hidden_states[count]))[0]
            assert close(view.head(states), expected)
            assert close(view.read(pool, [Chunk(text, 0, [0, 1])])[0], expected[-1])


def test_a_view_goes_on_from_what_the_whole_model_has_read() -> None:
    """Against transformers: a cache that the whole model has filled, then the model without some halves."""
    module = gentle(share=1.0)
    engine = engines(module)[1]
    text, more = ids(75), ids(5, 1)
    pool, pages = engine.new_pages(2), [1, 0]
    engine.step(pool, [Chunk(text, 0, pages)])
    view = View(engine, range(4), [1, 2], [0, 2])
    found = torch.cat([view.read(pool, [Chunk([token], 75 + at, pages)]) for at, token in enumerate(more)])
    with torch.no_grad():
        cache = module(torch.tensor([text]), use_cache=True).past_key_values
        part = without(copy.deepcopy(module), [1, 2], [0, 2])
        expected = part(torch.tensor([more]), past_key_values=cache).logits[0]
    assert close(found, expected)


def test_the_model_goes_on_as_if_nothing_had_been_drafted() -> None:
    engine = lean(loaded(gentle()))
    texts = [ids(length, length) for length in (60, 64, 90)]
    pages = [[0, 1], [2, 3], [4, 5]]
    clean, used = engine.new_pages(6), engine.new_pages(6)
    for pool in (clean, used):
        for tensor in pool.tensors:
            tensor.zero_()
        engine.step(pool, [Chunk(text, 0, mine) for text, mine in zip(texts, pages, strict=True)])
    view = View(engine, range(4), [0], [3])
    for at in range(7):
        view.read(used, [Chunk([9 + at], len(text) + at, mine) for text, mine in zip(texts, pages, strict=True)])
    assert not all(torch.equal(a, b) for a, b in zip(clean.tensors, used.tensors, strict=True))
    new = [Chunk(ids(7, 5), len(text), mine, 7) for text, mine in zip(texts, pages, strict=True)]
    assert torch.equal(engine.verify(clean, new)[0], engine.verify(used, new)[0])
    assert all(torch.equal(a, b) for a, b in zip(clean.tensors, used.tensors, strict=True))


def test_a_view_serves_many_pools_and_threads() -> None:
    engine = lean(loaded(gentle()))
    view, text = View(engine, range(2)), ids(70)
    expected = view.read(engine.new_pages(2), [Chunk(text, 0, [0, 1])])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for _ in range(3):
                assert torch.equal(view.read(engine.new_pages(2), [Chunk(text, 0, [1, 0])]), expected)
    finally:
        torch.set_num_threads(before)
    assert len(view._bound) <= 1  # pools that are gone are forgotten


def test_what_layers_leave_is_recorded_once() -> None:
    module = gentle(share=1.0)
    engine = engines(module)[1]
    texts = [ids(length, length) for length in (70, 3, 64)]
    pages = [[0, 1], [2], [3]]
    pieces = [Chunk(text, 0, mine) for text, mine in zip(texts, pages, strict=True)]
    pool, plain = engine.new_pages(4), engine.new_pages(4)
    recorder = pool.recorder = Recorder()
    assert torch.equal(engine.step(pool, pieces), engine.step(plain, pieces))
    assert pool.recorder is None
    with torch.no_grad():
        for text, mine in zip(texts, pages, strict=True):
            out = module(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
            states = recorder.of(mine, 0)
            assert states is not None
            assert states.shape == (4, len(text), 64)
            for layer in range(3):  # transformers norms the last one
                assert close(states[layer], out[layer + 1][0])
            assert close(module.model.norm(states[3]), out[4][0])
    assert recorder.of([9], 0) is None
    assert recorder.of([0, 1], 64) is None
    before = recorder.of([0, 1], 0)
    engine.step(pool, [Chunk([5], 70, [0, 1])])
    assert recorder.of([0, 1], 0) is before
    assert recorder.of([0, 1], 70) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_recorded_states_are_those_of_views(threads: int) -> None:
    engine = lean(loaded(gentle()))
    text, before = ids(50), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        pool = engine.new_pages(1)
        recorder = pool.recorder = Recorder()
        engine.step(pool, [Chunk(text, 0, [0])])
        for count in (1, 2, 4):
            states = View(engine, range(count)).states(engine.new_pages(1), [Chunk(text, 0, [0])])
            assert torch.equal(recorder.of([0], 0)[count - 1], states)  # type: ignore[index]
    finally:
        torch.set_num_threads(before)


def test_bytes_that_a_view_reads() -> None:
    engine = lean(loaded(gentle()))
    attention, mlp, head = 4 * (64 * 64 + 2 * 64 * 16 + 64 * 64), 4 * 3 * 64 * 96, 4 * 64 * 400
    assert View(engine, range(4)).weight_bytes == 4 * (attention + mlp) + head
    assert View(engine, range(4), [0, 1], [1]).weight_bytes == 2 * attention + 3 * mlp + head
    assert View(engine, [2]).weight_bytes == attention + mlp + head


# ---------------------------------------------------------------- adapters
@pytest.mark.parametrize("name", ["grouped", "odd heads, biases", "qwen2", "qwen3", "mistral, window"])
@pytest.mark.parametrize("feed_forward", [False, True])
def test_an_adapter_is_a_layer_of_its_own(name: str, feed_forward: bool, tmp_path: Any) -> None:
    module = gentle(name, 1.0)
    engine = engines(module)[1]
    tensors = load_file(adapter(tmp_path, module, 2, feed_forward) / "adapter.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] * 0.9
    found = Adapter(engine, tensors, 2, "here")
    part = copy.deepcopy(module)
    part.model.layers = part.model.layers[:3]
    part.config.num_hidden_layers = 3
    if getattr(part.config, "layer_types", None):
        part.config.layer_types = part.config.layer_types[:3]
    part.model.layers[2].load_state_dict(
        {name: value for name, value in tensors.items() if name != "norm.weight"}, strict=False
    )
    part.model.norm.weight.data = tensors["norm.weight"]
    if not feed_forward:
        without(part, [], [2])
    text = ids(80)
    with torch.no_grad():
        expected = part(torch.tensor([text]), use_cache=False).logits[0]
    pool, memory = engine.new_pages(2), found.make_memory(2)
    view = View(engine, range(2))
    for start, end in ((0, 66), (66, 67), (67, 80)):
        states = view.states(pool, [Chunk(text[start:end], start, [0, 1])])
        logits = found.read(memory, [Chunk(text[start:end], start, [1, 0])], states)
        assert close(logits[0], expected[end - 1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("self_attn.k_proj.weight"), "here has no self_attn.k_proj.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(63)}), r"norm.weight is \[63\], and this model needs \[64\]"),
        (lambda t: t.update({"extra": torch.ones(1)}), "here holds extra, which is no part of an adapter"),
        (lambda t: t.update({"mlp.up_proj.weight": torch.ones(96, 64)}), "here has no mlp.gate_proj.weight"),
        (
            lambda t: t.update({"self_attn.q_proj.weight": t["self_attn.q_proj.weight"].double()}),
            "self_attn.q_proj.weight is float64; allowed are float32, bfloat16, float16",
        ),
    ],
)
def test_adapters_that_do_not_fit(change: Any, said: str, tmp_path: Any) -> None:
    module = gentle()
    tensors = load_file(adapter(tmp_path, module) / "adapter.safetensors")
    change(tensors)
    with pytest.raises(ArtifactError, match=said):
        Adapter(engines(module)[1], tensors, 1, "here")
