"""Speculative decoding over transformers' modules: ragged batches, any drafts, the texts of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from speculation_cases import (
    VOCABULARY,
    Reading,
    Scripted,
    ScriptedChain,
    answers,
    assert_states_are_read_by,
    model_over,
    prompts,
)
from tiny_models import llama, tokenizer
from torch_speculation import CPU, FAMILIES, drafting, module_of

from runtime.drafting.drafters.base import Ask, Drafter
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.lengths.goodput import Goodput
from runtime.engines.torch.engine import TorchEngine
from runtime.sampling.tree import ROOT, Tree


def in_batches(model: Any, texts: Sequence[list[int]], size: int, **options: Any) -> list[list[int]]:
    parts = (list(texts[start : start + size]) for start in range(0, len(texts), size))
    return [new for part in parts for new in model.generate(part, **options)]


@pytest.fixture(scope="module")
def module() -> Any:
    return module_of("llama")


@pytest.fixture(scope="module")
def plain(module: Any) -> Any:
    return model_over(TorchEngine(module, CPU))


# ---------------------------------------------------------------- the same texts
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_plain_decoding(family: str) -> None:
    module = module_of(family)
    plain = model_over(TorchEngine(module, CPU))
    engine = plain.engine
    assert engine.lockstep
    assert engine.why_not_drafts() is None
    texts = prompts(24, 70)
    truth = answers(plain, texts, max_new_tokens=32)
    assert len({tuple(new) for new in truth.values()}) > 2
    for drafter in (Scripted(truth), ScriptedChain(truth)):
        model = drafting(module, drafter)
        assert in_batches(model, texts, 8, max_new_tokens=32) == list(truth.values())
        assert model.stats["steps"] < 32 / 1.5
        assert drafter.begun == drafter.ended == 24
    assert in_batches(model, texts[:3], 1, max_new_tokens=32) == list(truth.values())[:3]


def test_hundreds_of_prompts(module: Any, plain: Any) -> None:
    texts = [list(text) for text in dict.fromkeys(map(tuple, prompts(320, 40, seed=3)))]
    truth = answers(plain, texts, max_new_tokens=20)
    drafter = Scripted(truth, right=0.7)
    model = drafting(module, drafter)
    assert model.generate(texts, max_new_tokens=20) == list(truth.values())
    stats = model.stats
    for name in ("new_tokens", "prompt_tokens", "sequences", "finish_reasons"):
        assert stats[name] == plain.stats[name]
    assert 0 < stats["acceptance_rate"] < 1
    assert stats["cache_bytes"] > 0
    assert stats["tokens_per_second"] > 0
    assert "scripted" in stats["drafter"]


@pytest.mark.parametrize("lengths", [Fixed(depth=20, nodes=60), Fixed(depth=1, nodes=1), Goodput()])
def test_however_much_is_drafted(module: Any, plain: Any, lengths: Any) -> None:
    texts = prompts(10, 50, seed=4)
    truth = answers(plain, texts, max_new_tokens=50)
    assert drafting(module, Scripted(truth), lengths).generate(texts, max_new_tokens=50) == list(truth.values())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_functions(implementation: str) -> None:
    module = module_of("llama", attn_implementation=implementation)
    texts = prompts(8, 60)
    truth = answers(model_over(TorchEngine(module, CPU)), texts, max_new_tokens=30)
    assert drafting(module, Scripted(truth)).generate(texts, max_new_tokens=30) == list(truth.values())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.8},
    ],
)
def test_a_seed_gives_the_text_of_plain_decoding(module: Any, plain: Any, options: Any) -> None:
    texts = prompts(16, 60)
    options = {**options, "seed": list(range(16)), "max_new_tokens": 40}
    truth = answers(plain, texts, **options)
    drafter = Scripted(truth)
    drafter.draws = True  # it would be allowed to; a seed promises the text
    model = drafting(module, drafter)
    assert in_batches(model, texts, 8, **{**options, "seed": 0})[0] == truth[tuple(texts[0])]
    assert model.generate(texts, **options) == list(truth.values())
    assert model.stats["mean_accepted"] > 0.8


def test_texts_end_where_plain_ones_do(module: Any, plain: Any) -> None:
    texts = prompts(16, 30, seed=7)
    everything = answers(plain, texts, max_new_tokens=80, ignore_eos=True)
    model = drafting(module, Scripted(everything, right=1.0))
    for count in (1, 2, 5, 80):
        expected = [new[:count] for new in everything.values()]
        assert model.generate(texts, max_new_tokens=count, ignore_eos=True) == expected
    # Ends of texts that come in the middle of what is accepted.
    ends = {new[place] for new, place in zip(everything.values(), range(3, 19), strict=True)}
    stopping = model_over(TorchEngine(module, CPU), eos=ends)
    expected = stopping.generate(texts, max_new_tokens=80)
    assert len({len(new) for new in expected}) > 4
    model = drafting(module, Scripted(everything, right=1.0), eos=ends)
    assert model.generate(texts, max_new_tokens=80) == expected
    assert model.stats["finish_reasons"] == stopping.stats["finish_reasons"]
    assert model.stats["new_tokens"] == stopping.stats["new_tokens"]


def test_no_more_is_drafted_than_can_follow(module: Any, plain: Any) -> None:
    texts = prompts(6, 20, seed=6)
    truth = answers(plain, texts, max_new_tokens=23, ignore_eos=True)

    class Noting(Scripted):
        def draft(self, asks: Sequence[Ask]) -> list[Tree]:
            rooms.extend((ask.depth, 23 - (len(ask.text.tokens) - ask.text.prompt)) for ask in asks)
            return super().draft(asks)

    rooms: list[tuple[int, int]] = []
    model = drafting(module, Noting(truth), Fixed(depth=9, nodes=30))
    assert model.generate(texts, max_new_tokens=23, ignore_eos=True) == list(truth.values())
    # The last token is the target's own.
    assert all(depth == min(9, left - 1) for depth, left in rooms)
    assert min(left for _, left in rooms) < 9


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_context_ends_texts(family: str) -> None:
    module = module_of(family, max_position_embeddings=48, n_positions=48)  # a 49th position does not exist in GPT-2
    texts = prompts(10, 40, seed=8)
    plain = model_over(TorchEngine(module, CPU))
    truth = answers(plain, texts)
    assert plain.stats["finish_reasons"].count("length") > 5
    # It goes on where the text cannot.
    further = {prompt: [*new, *prompts(1, 40)[0]] for prompt, new in truth.items()}
    model = drafting(module, Scripted(further, right=1.0))
    assert model.generate(texts) == list(truth.values())


def test_stop_strings_and_streams() -> None:
    module = llama()
    plain = model_over(TorchEngine(module, CPU), tokenizer=tokenizer())
    texts = ["Once upon a time", "cat", "def add(a, b):", "the moon"]
    ids = [plain.tokenizer(text)["input_ids"] for text in texts]
    truth = answers(plain, ids, max_new_tokens=60, ignore_eos=True)
    model = drafting(module, Scripted(truth), tokenizer=tokenizer())
    for stop in (["e"], ["a", "th"], ["zzzz"]):
        expected = plain.generate(texts, max_new_tokens=60, stop=stop)
        assert model.generate(texts, max_new_tokens=60, stop=stop) == expected
        assert ["".join(model.stream(text, max_new_tokens=60, stop=stop)) for text in texts] == expected
    # A stream that nobody reads to its end.
    drafter = model.speculation.drafter
    stream = model.stream(texts[0], max_new_tokens=60)
    for _ in range(9):  # so far that something was drafted
        next(stream)
    stream.close()
    assert drafter.begun == drafter.ended + 1  # it is ended in a turn, which the next call takes
    model.generate(texts[:1], max_new_tokens=3)
    assert drafter.begun == drafter.ended


# ---------------------------------------------------------------- drafters
def test_hidden_states_belong_to_their_tokens(module: Any, plain: Any) -> None:
    texts = prompts(6, 50)
    truth = answers(plain, texts, max_new_tokens=20)
    drafter = Reading(truth)
    model = drafting(module, drafter)
    assert model.generate(texts, max_new_tokens=20) == list(truth.values())
    assert len(drafter.states) == 6
    assert_states_are_read_by(module.get_output_embeddings(), plain, drafter)


class Twin(Drafter):
    """Draws from the target's own distribution, so that nothing of it may be rejected."""

    name = "twin"
    draws = True
    vocabulary = VOCABULARY

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def watched(self) -> bool:
        return False

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        trees = []
        for ask in asks:
            assert ask.draw is not None
            tree, text, node = Tree(), list(ask.text.tokens), ROOT
            for _ in range(min(ask.depth, 3)):
                chances = (self._module(torch.tensor([text])).logits[0, -1].double() / 0.8).softmax(-1)
                token = int(torch.multinomial(chances, 1, generator=ask.draw.generator))
                tree.proposals[node] = chances.float()
                node = tree.add(token, node)
                text.append(token)
            trees.append(tree)
        return trees


def test_what_the_targets_own_distribution_draws_is_accepted(module: Any) -> None:
    model = drafting(module, Twin(module))
    model.generate(prompts(6, 20), max_new_tokens=24, temperature=0.8, ignore_eos=True)
    assert model.stats["drafted_tokens"] > 90
    assert model.stats["acceptance_rate"] > 0.98


@pytest.mark.parametrize("when", [0, 2])
def test_a_drafter_that_fails_is_switched_off(module: Any, plain: Any, when: int, caplog: Any) -> None:
    texts = prompts(5, 20)
    truth = answers(plain, texts, max_new_tokens=30)

    class Broken(Scripted):
        calls = 0

        def draft(self, asks: Any) -> list[Tree]:
            self.calls += 1
            if self.calls > when:
                raise ZeroDivisionError("by zero")
            return super().draft(asks)

    drafter = Broken(truth)
    model = drafting(module, drafter)
    assert model.generate(texts, max_new_tokens=30) == list(truth.values())
    assert "switched off: ZeroDivisionError" in model.stats["drafter"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert model.generate(texts, max_new_tokens=30) == list(truth.values())
    assert drafter.calls == when + 1


def test_nothing_drafted_is_plain_decoding(module: Any, plain: Any) -> None:
    texts = prompts(9, 40)

    class Silent(Scripted):
        def draft(self, asks: Any) -> list[Tree]:
            return [Tree() for _ in asks]

    for options in ({}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}):
        model = drafting(module, Silent({}))
        assert model.generate(texts, max_new_tokens=30, **options) == plain.generate(
            texts, max_new_tokens=30, **options
        )
        assert model.stats["steps"] == plain.stats["steps"]
