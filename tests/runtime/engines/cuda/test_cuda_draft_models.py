"""Draft models on the lean GPU engine, run without a GPU: what they draft, in memory that grows, from several threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_models import build, engine
from fake_graph import Fake
from speculation_cases import VOCABULARY, accept_head, answers, model_over, prompts, speculation

from runtime.drafting.draft_cache import Slot, draft_cache_of
from runtime.drafting.drafters.base import Ask
from runtime.drafting.drafters.cascade import Cascade
from runtime.drafting.drafters.confident import Confident, StateCache
from runtime.drafting.drafters.model import Candidates, ModelDrafter, Parallel
from runtime.drafting.drafters.staged_speculation import StagedSpeculation
from runtime.drafting.lengths.fixed import Fixed
from runtime.engines.base import Chunk
from runtime.engines.cuda.steps import CudaGraphs

KINDS: dict[str, Any] = {
    "chain": ModelDrafter,
    "staged": StagedSpeculation,
    "parallel": Parallel,
    "confident": Confident,
}
SHAPE = {"vocab_size": VOCABULARY, "max_position_embeddings": 512}


def lean(noise: float = 0.0, device: str = "cpu", **options: Any) -> Any:
    """The same tiny model each time, or with weights a little off."""
    model = build("Llama", **SHAPE)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if noise and parameter.dim() == 2:
            parameter.data += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    if device == "cpu":
        return engine(model, **options)
    return engine(model.to(device), capture=CudaGraphs(torch.device(device)), **options)


def drafter(kind: str, noise: float = 0.02, **options: Any) -> Any:
    if kind == "cascade":
        return Cascade([drafter("chain", 5 * noise), drafter("chain", noise)])
    which = lean(noise, **options)
    own = {"cache": draft_cache_of(which), "candidates": Candidates(VOCABULARY)}
    if kind == "confident":
        own |= {"cache": StateCache(which), "head": accept_head(64)}
    return KINDS[kind](**own)


@pytest.fixture(scope="module")
def plain() -> Any:
    return model_over(lean())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [*KINDS, "cascade"])
def test_texts_are_those_of_plain_decoding(plain: Any, kind: str) -> None:
    texts = prompts(12, 40)  # more than the first memory of the draft holds
    own = drafter(kind)
    drafting = model_over(lean(), speculation(own, Fixed(depth=4, nodes=4)))
    for options in ({}, {"temperature": 0.9, "seed": list(range(12))}):
        truth = answers(plain, texts, max_new_tokens=20, **options)
        assert drafting.generate(texts, max_new_tokens=20, **options) == list(truth.values())
        if kind != "parallel":  # an untrained one does not know its mask token
            assert drafting.stats["accepted_tokens"] > (10 if options else 60)
    assert drafting.speculation is not None
    assert drafting.speculation.off is None
    assert own.memory_bytes > 16 * drafting.engine.page_bytes  # type: ignore[attr-defined]


def test_sampled_texts_are_drafted_for(plain: Any) -> None:
    drafting = model_over(lean(), speculation(drafter("chain", noise=0.0), Fixed(depth=4, nodes=4)))
    drafting.generate(prompts(12, 20), max_new_tokens=20, temperature=1.0, ignore_eos=True)
    assert drafting.stats["acceptance_rate"] > 0.99


@pytest.mark.parametrize("most", [3, 2048])
def test_lanes_read_what_their_engine_reads(most: int) -> None:
    """Through graphs of a memory that is replaced by a larger one, and of states beside them."""
    fake = Fake()
    which = lean(capture=fake)
    slots = StateCache(which)
    slots.most_rows = most
    texts = prompts(20, 30, seed=3)
    opened = [Slot() for _ in texts]
    first, last = [text[:-1] or [9] for text in texts], [[text[-1]] for text in texts]
    slots.feed(opened[:3], first[:3])
    before = slots.nbytes
    slots.feed(opened[3:], first[3:])
    assert slots.nbytes > before
    for _ in range(2):
        found = slots.feed(opened, last)
        states = slots.states
        for row, state, tokens in zip(found, states, (slot.tokens for slot in opened), strict=True):
            wanted = which.logits(torch.tensor([tokens]))[0, -1]
            torch.testing.assert_close(row, wanted, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(which.parts.head(state), row, rtol=2e-4, atol=2e-4)
    assert fake.replays


def test_trees_are_not_asked_of_it() -> None:
    assert not draft_cache_of(lean()).trees


def test_drafted_chains_are_those_of_the_model() -> None:
    which = lean()
    own = ModelDrafter(draft_cache_of(which), Candidates(VOCABULARY))
    text = SimpleNamespace(tokens=prompts(1, 30)[0], prompt=1)
    (tree,) = own.draft([Ask(own.begin(text), text, 5, 5)])
    written = model_over(lean()).generate([text.tokens], max_new_tokens=5, ignore_eos=True)
    assert [tree.tokens] == written


def test_reading_is_guarded_as_any_other_computation() -> None:
    which = lean()
    memory = which.make_memory(2)
    for _ in range(2):  # the second is a decode step
        assert which.read(memory, [Chunk([5, 6], 0, [1])]).is_inference()
        assert which.step(memory, [Chunk([7], 2, [1])]).is_inference()
    read = threading.Event()

    def other() -> None:
        which.read(memory, [Chunk([5, 6], 0, [1])])
        read.set()

    with which._lock:
        thread = threading.Thread(target=other)
        thread.start()
        assert not read.wait(0.1)
    thread.join()
    assert read.is_set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
def test_drafts_on_a_gpu(kind: str, options: Any) -> None:
    own = drafter(kind, noise=0.0, device="cuda:0")
    drafting = model_over(lean(device="cuda:0"), speculation(own, Fixed(depth=4, nodes=4)))
    drafting.generate(prompts(12, 40), max_new_tokens=20, ignore_eos=True, **options)
    assert drafting.speculation is not None
    assert drafting.speculation.off is None
    if kind != "parallel":
        assert drafting.stats["acceptance_rate"] > 0.9
