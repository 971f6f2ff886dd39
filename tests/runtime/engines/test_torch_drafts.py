"""Token trees over transformers' caches: what is kept leaves no trace of the rest, and models that cannot do it say so."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from speculation_cases import VOCABULARY, Scripted, answers, model_over, prompts, speculation
from torch_speculation import CPU, drafting, module_of

from runtime.engines.base import Chunk
from runtime.engines.torch import drafts as torch_drafts
from runtime.engines.torch.drafts import TreePool, probe
from runtime.engines.torch.engine import TorchEngine
from runtime.errors import RequestError


@pytest.fixture(scope="module")
def module() -> Any:
    return module_of("llama")


# ---------------------------------------------------------------- the cache
def random_chunk(row: int, start: int, draw: random.Random) -> Chunk:
    """A tree of up to 7 nodes behind a token, or a chain."""
    count = draw.randint(1, 8)
    ids = [draw.randrange(VOCABULARY) for _ in range(count)]
    parents = None if draw.random() < 0.3 else [-1, *(draw.randrange(index) for index in range(1, count))]
    return Chunk(ids, start, (row,), count, parents)


def branch(chunk: Chunk, node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = node - 1 if chunk.parents is None else chunk.parents[node]
    return found[::-1]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("mistral", {}), ("gemma2", {}), ("mistral", {"sliding_window": 3})],
    ids=["llama", "mistral", "gemma2", "a window that trees are larger than"],
)
@pytest.mark.parametrize("holes", [0, 4, 10**6])
def test_whatever_is_kept_the_rest_leaves_no_trace(
    family: str, changes: Any, holes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random trees on random texts, random branches kept, rows that leave: logits are those of the texts alone."""
    monkeypatch.setattr(torch_drafts, "FREE_HOLES", holes)
    monkeypatch.setattr(torch_drafts, "HOLES_SHARE", 0.0)
    module = module_of(family, **changes)
    engine, draw = TorchEngine(module, CPU), random.Random(holes)
    texts = prompts(5, 30, seed=holes)
    pool, rows = TreePool(engine, module), list(range(5))
    logits, hidden = pool.run([Chunk(text, 0, (row,)) for row, text in enumerate(texts)], hidden=True)
    assert hidden is not None
    assert len(hidden) == sum(map(len, texts))
    widest = 0

    @torch.inference_mode()
    def alone(text: list[int]) -> torch.Tensor:
        result: torch.Tensor = module(torch.tensor([text])).logits[0, -1]
        return result

    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], alone(text), atol=1e-3, rtol=1e-3)
    for step in range(14):
        chunks = [random_chunk(row, len(text), draw) for row, text in zip(rows, texts, strict=True)]
        logits, hidden = pool.run(chunks, hidden=True)
        assert hidden is not None
        row, paths = 0, []
        for text, chunk in zip(texts, chunks, strict=True):
            node = draw.randrange(len(chunk.tokens))
            path = branch(chunk, node)
            kept = [*text, *(chunk.tokens[index] for index in path)]
            torch.testing.assert_close(logits[row + node], alone(kept), atol=2e-3, rtol=2e-3)
            paths.append(path[: draw.randint(1, len(path))])
            row += len(chunk.tokens)
        assert row == len(logits) == len(hidden)
        if step in (5, 9):  # rows that leave are those that the next step does not name
            left = sorted(draw.sample(range(len(texts)), len(texts) - 1))
            rows, texts, chunks, paths = ([each[i] for i in left] for each in (rows, texts, chunks, paths))
        for number, path in zip(rows, paths, strict=True):
            engine.keep(pool, Chunk((), 0, (number,)), [node - 1 for node in path[1:]])
        texts = [
            [*text, *(chunk.tokens[index] for index in path)]
            for text, chunk, path in zip(texts, chunks, paths, strict=True)
        ]
        if step not in (5, 9):  # otherwise done by the next step
            pool.settle()
        for kind in pool._columns if step not in (5, 9) else ():
            width, longest = kind.places.shape[1], max(map(len, texts))
            for number in kind.layers:
                layer = pool.cache.layers[number]
                assert layer.keys.shape[2] == layer.values.shape[2] == width
            if holes < 5:
                assert width <= (min(kind.window, longest) if kind.window else longest) + holes
            widest = max(widest, width - longest)
    assert holes < 5 or family != "llama" or widest > 10


def test_one_text_has_no_holes(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_drafts, "FREE_HOLES", 10**6)
    text = prompts(1, 30, seed=2)[0]
    truth = answers(model_over(TorchEngine(module, CPU)), [text], max_new_tokens=60, ignore_eos=True)
    widths = []
    keep = TreePool.keep_paths

    def noting(self: TreePool, paths: Any) -> None:
        keep(self, paths)
        widths.append(self._columns[0].places.shape[1])
        assert self._lengths == [widths[-1]]

    monkeypatch.setattr(TreePool, "keep_paths", noting)
    model = drafting(module, Scripted(truth))
    assert model.generate(text, max_new_tokens=60, ignore_eos=True) == truth[tuple(text)]
    assert len(widths) == model.stats["steps"] - 2  # not after the prompt, not at the end
    assert widths[-1] > len(text) + 40


# ---------------------------------------------------------------- models that cannot
@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM takes no positions"),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, "counts distances by"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "has layers of chunked_attention"),
        ("roberta", {"is_decoder": True, "type_vocab_size": 1}, "does not compute the branches .* off by 0"),
    ],
)  # fmt: skip
def test_models_that_verify_no_drafts_say_why(family: str, options: Any, reason: str) -> None:
    engine = TorchEngine(module_of(family, **options), CPU)
    why = engine.why_not_drafts()
    assert why is not None
    assert len(why.splitlines()) == 1
    assert re.search(reason, why)
    if family != "roberta":  # what is found by trying alone
        model = model_over(engine, speculation(Scripted({})))
        with pytest.raises(RequestError, match=reason):
            model.generate([5, 6])


def test_a_model_that_ignores_masks_is_found_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchEngine(module, CPU)
    assert probe(engine, engine.module) is None
    forward = TorchEngine.forward

    def causal(self: Any, ids: Any, cache: Any, mask: Any, positions: Any, last_only: bool = False) -> Any:
        return forward(self, ids, cache, None if mask is not None and mask.dim() == 4 else mask, positions, last_only)

    monkeypatch.setattr(TorchEngine, "forward", causal)
    assert "does not compute the branches of a draft as if they were alone" in str(probe(engine, engine.module))

    def refuses(self: Any, ids: Any, cache: Any, mask: Any, positions: Any, last_only: bool = False) -> Any:
        if mask is not None and mask.dim() == 4:
            raise ValueError("masks have two dimensions\nand more")
        return forward(self, ids, cache, mask, positions, last_only)

    monkeypatch.setattr(TorchEngine, "forward", refuses)
    expected = "LlamaForCausalLM does not take the mask of a token tree: masks have two dimensions"
    assert probe(engine, engine.module) == expected


def test_other_attention_functions_are_refused(module: Any) -> None:
    engine = TorchEngine(module_of("llama"), CPU)
    engine.module.config._attn_implementation = "flex_attention"
    assert "computes attention with 'flex_attention'" in str(engine.why_not_drafts())
