"""All drafters that need no model: what any of them must hold to, whatever the text."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

import pytest
import torch
from drafter_cases import FREE, VOCABULARY, Words, Writing, branches, check_tree, random_text
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.settings import check_numbers
from runtime.drafting.drafters.base import Ask, Drafter, Verified
from runtime.drafting.drafters.composition import Fallback, Merged
from runtime.drafting.drafters.lookup import Lookup
from runtime.drafting.drafters.trie import Trie
from runtime.sampling.tree import Tree

ALL = {
    **FREE,
    "copyspec": lambda: Lookup(longest=3, shortest=3),
    "first": lambda: Fallback([Lookup(), Trie()]),
    "merged": lambda: Merged([FREE["suffix"](), FREE["recycling"]()]),
}
EVERY = pytest.mark.parametrize("name", ALL)
#: These learn from the text; recycling learns from logits alone.
FROM_TEXT = pytest.mark.parametrize("name", [name for name in ALL if name != "recycling"])


@EVERY
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 4),
)
@settings(max_examples=12, deadline=None)
def test_trees_are_trees_within_what_was_asked(
    name: str, seed: int, prompt: int, rest: int, nodes: int, depth: int, letters: int
) -> None:
    text = random_text(seed, prompt + rest, letters)
    writing = Writing(ALL[name](), text[:prompt], text[prompt:], nodes, depth).finish()
    assert writing.text.tokens == text
    for tree in writing.trees:
        check_tree(tree, nodes, depth)


@EVERY
def test_a_text_of_one_token_and_nothing_known_gives_an_empty_tree(name: str) -> None:
    drafter = ALL[name]()
    text = Words([5], 1)
    state = drafter.begin(text)
    (tree,) = drafter.draft([Ask(state, text, 16, 8)])
    assert (tree.tokens, tree.parents, tree.chances, tree.proposals) == ([], [], [], {})


@FROM_TEXT
def test_a_text_without_repetition_gives_an_empty_tree(name: str) -> None:
    drafter = ALL[name]()
    text = Words(list(range(500)), 500)
    (tree,) = drafter.draft([Ask(drafter.begin(text), text, 16, 8)])
    assert not len(tree)


@EVERY
@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_periodic_text_is_foreseen(name: str, period: int) -> None:
    pattern = list(range(10, 10 + period))
    writing = Writing(ALL[name](), pattern * 3, pattern * (210 // period), 16, 8).finish()
    # Recycling's trees have a fixed shape, which is wide as long as little is known.
    assert writing.pace > (3 if name == "recycling" else 5)


@FROM_TEXT
@pytest.mark.parametrize("length", [300, 5000])
def test_a_text_that_repeats_its_prompt_is_foreseen(name: str, length: int) -> None:
    source = random.Random(0)
    prompt = [source.randrange(4000) for _ in range(length)]
    writing = Writing(ALL[name](), prompt, prompt[length // 2 :][:200], 16, 8, vocabulary=4000).finish()
    assert writing.pace > 4


@FROM_TEXT
def test_what_was_written_once_is_foreseen_in_another_text(name: str) -> None:
    if name in ("lookup", "copyspec"):
        pytest.skip("it looks at one text alone")
    source = random.Random(0)
    output = [source.randrange(4000) for _ in range(300)]
    drafter = ALL[name]()
    first = Writing(drafter, [1, 2], output, vocabulary=4000).finish()
    again = Writing(drafter, [3, 4], output, vocabulary=4000).finish()
    assert first.pace < 1.5
    assert again.pace > 4


def test_recycling_foresees_what_the_logits_said_in_another_text() -> None:
    source = random.Random(0)
    output = source.sample(range(4000), 300)
    drafter = FREE["recycling"]()
    first = Writing(drafter, [1, 2], output, vocabulary=4000).finish()
    again = Writing(drafter, [3, 4], output, vocabulary=4000).finish()
    assert first.pace < 1.5
    assert again.pace > 4


@EVERY
def test_texts_that_take_turns_are_foreseen_each_as_if_alone(name: str) -> None:
    """With nothing in common: one drafter for both gives the trees of two drafters of their own."""
    texts = [random_text(1, 150, 4), [20 + token for token in random_text(2, 150, 4)]]
    alone = [Writing(ALL[name](), text[:50], text[50:]) for text in texts]
    shared = ALL[name]()
    together = [Writing(shared, text[:50], text[50:]) for text in texts]
    for each in alone:
        each.finish()
    turns = random.Random(0)
    while not all(each.done for each in together):
        turns.choice([each for each in together if not each.done]).step()
    for one, other in zip(alone, together, strict=True):
        if name in ("lookup", "copyspec", "suffix", "hierarchy", "trie"):
            # What is learned of chances is shared, so these may differ, and with them what is left out of a tree.
            assert abs(one.pace - other.pace) < 0.35 * one.pace
        assert other.text.tokens == one.text.tokens


@EVERY
def test_asks_of_one_call_are_answered_each_for_its_own_text(name: str) -> None:
    drafter = ALL[name]()
    writings = [Writing(drafter, text[:60], text[60:]) for text in (random_text(seed, 80) for seed in range(3))]
    asks = [Ask(each.state, each.text, nodes, 8) for each, nodes in zip(writings, (16, 1, 5), strict=True)]
    together = drafter.draft(asks)
    assert [drafter.draft([ask])[0] for ask in asks] == together


@EVERY
def test_it_learns_though_it_was_not_asked_and_another_tree_was_verified(name: str) -> None:
    drafter = ALL[name]()
    pattern = [1, 2, 3, 4, 5]
    writing = Writing(drafter, pattern, pattern * 20)
    stranger = Tree.chain([7, 8, 9])
    while len(writing.text.tokens) < 60:
        place = len(writing.text.tokens)
        token = pattern[place % 5]
        writing.text.tokens.append(token)
        logits = torch.zeros(4, VOCABULARY)
        logits[0, token] = 1.0
        drafter.learn(writing.state, Verified(writing.text, stranger, [], [token], logits))
    tree = writing.step()
    found = [branch for branch in branches(tree) if branch[:3] == [1, 2, 3]]
    assert found


@EVERY
def test_a_tree_of_which_less_is_verified_is_learned_from_just_so(name: str) -> None:
    text = random_text(3, 300)
    writing = Writing(ALL[name](), text[:100], text[100:])
    while not writing.done:
        check_tree(writing.step(kept=len(writing.text.tokens) % 4), 16, 8)
    assert writing.text.tokens == text


@EVERY
def test_chances_are_what_comes_true(name: str) -> None:
    """Over a long text the tokens that are expected to be accepted are about those that are."""
    source = random.Random(0)
    text: list[int] = []
    while len(text) < 4000:  # pieces come again, three times in four
        start = source.randrange(len(text) + 1)
        fresh = source.random() < 0.25 or len(text) < 50
        text += [source.randrange(30) for _ in range(6)] if fresh else text[start : start + source.randrange(1, 30)]
    writing = Writing(ALL[name](), text[:1000], text[1000:], vocabulary=30)
    expected = accepted = 0.0
    while not writing.done:
        before = len(writing.text.tokens)
        tree = writing.step()
        if before > 2000:
            expected += sum(tree.reach())
            accepted += len(writing.text.tokens) - before - 1
    assert accepted > 100
    assert 0.75 < expected / accepted < 1.33


@EVERY
def test_unlikely_branches_do_not_go_on_where_that_is_asked(name: str) -> None:
    text = random_text(4, 400)
    writing = Writing(ALL[name](), text[:200], text[200:])
    for _ in range(30):
        writing.step()
    (tree,) = writing.drafter.draft([Ask(writing.state, writing.text, 64, 16, least=0.3)])
    reach = tree.reach()
    if name not in ("first", "merged"):  # whose trees are of several
        assert all(parent < 0 or reach[parent] >= 0.3 for parent in tree.parents)
    check_tree(tree, 64, 16)


# ---------------------------------------------------------------- time and memory
@EVERY
@pytest.mark.parametrize("repeated", [False, True])
def test_a_long_prompt_is_read_at_once(name: str, repeated: bool) -> None:
    source = random.Random(0)
    drafter, text = (
        ALL[name](),
        Words([7 if repeated else int(source.paretovariate(0.6)) % 30_000 for _ in range(100_000)], 100_000),
    )
    started = time.process_time()
    state = drafter.begin(text)
    assert time.process_time() - started < 1.0  # 0.04 s on an idle core
    started = time.process_time()
    for _ in range(20):
        drafter.draft([Ask(state, text, 16, 8)])
    assert time.process_time() - started < 0.2  # 0.3 ms each and less


@EVERY
def test_a_text_that_ended_leaves_no_memory_but_what_was_learned(name: str) -> None:
    drafter = ALL[name]()
    source = random.Random(0)
    text = [source.randrange(VOCABULARY) for _ in range(3000)]
    first = Writing(drafter, text[:2900], text[2900:]).finish()
    learned = drafter.memory_bytes
    second = Writing(drafter, text[:2900], text[2900:])
    while not second.done:
        second.step()
    held = drafter.memory_bytes
    drafter.end(second.state)
    drafter.end(second.state)  # once more does no harm
    assert drafter.memory_bytes <= max(held, learned) + 100_000
    if name not in ("recycling", "adaptive-ngram"):
        assert drafter.memory_bytes < held
    assert first.text.tokens == text


@EVERY
def test_what_was_learned_is_forgotten_on_reset(name: str) -> None:
    def fresh(drafter: Drafter) -> list[Tree]:
        return Writing(drafter, [3, 4], text, vocabulary=4000).finish().trees

    source = random.Random(0)
    text = [source.randrange(4000) for _ in range(100)] * 2
    drafter = ALL[name]()
    before, empty = fresh(drafter), ALL[name]().memory_bytes
    drafter.reset()
    assert drafter.memory_bytes <= empty
    assert fresh(drafter) == before


@EVERY
def test_texts_go_on_after_a_reset_in_their_middle(name: str) -> None:
    text = random_text(6, 200)
    writing = Writing(ALL[name](), text[:60], text[60:])
    writing.step()
    writing.drafter.reset()
    for tree in writing.finish().trees:
        check_tree(tree, 16, 8)


SMALL: dict[str, dict[str, Any]] = {
    "suffix": {"history": 2000},
    "hierarchy": {"history": 2000},
    "trie": {"capacity": 2000},
    "adaptive-ngram": {"capacity": 2000},
}


@pytest.mark.parametrize("name", FREE)
def test_endless_serving_takes_bounded_memory(name: str) -> None:
    drafter = FREE[name](**SMALL.get(name, {}))
    source = random.Random(0)
    held = []
    for _ in range(60):
        text = [source.randrange(1000) for _ in range(140)]
        Writing(drafter, text[:20], text[20:], vocabulary=1000).finish()
        held.append(drafter.memory_bytes)
    assert max(held[30:]) <= 1.1 * max(held[:30])
    assert max(held) < 600_000


@pytest.mark.parametrize("name", [name for name in FREE if name != "recycling"])
def test_the_memory_that_is_said_is_the_memory_that_is_taken(name: str) -> None:
    source = random.Random(0)
    texts = [Words([source.randrange(5000) for _ in range(6000)], 1000) for _ in range(3)]
    drafter = FREE[name]()

    def write(text: Words) -> None:
        state = drafter.begin(text)
        drafter.learn(state, Verified(text, Tree(), [], text.tokens[1000:], torch.zeros(1, 1)))
        drafter.end(state)

    tracemalloc.start()
    try:
        said, taken = drafter.memory_bytes, tracemalloc.get_traced_memory()[0]
        open_text = drafter.begin(texts[0])
        write(texts[1])
        write(texts[2])
        said, taken = drafter.memory_bytes - said, tracemalloc.get_traced_memory()[0] - taken
    finally:
        tracemalloc.stop()
    drafter.end(open_text)
    assert 0.6 * taken < said < 1.7 * taken


# ---------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("lookup", {"longest": 0}, "lookup.longest must be an? (integer|number) between"),
        ("lookup", {"longest": 2, "shortest": 3}, "lookup.shortest must be at most lookup.longest"),
        ("lookup", {"candidates": 1.5}, "lookup.candidates must be an integer"),
        ("suffix", {"factor": -1}, "suffix.factor must be an? (integer|number) between"),
        ("suffix", {"longest": 1000}, "suffix.longest must be an? (integer|number) between"),
        ("trie", {"prefix": 10}, "trie.prefix must be below trie.branch"),
        ("trie", {"capacity": 3}, "trie.capacity must be an? (integer|number) between"),
        ("recycling", {"candidates": 0}, "recycling.candidates must be an? (integer|number) between"),
        ("hierarchy", {"longest": 2, "shortest": 3}, "hierarchy.shortest must be at most hierarchy.longest"),
        ("hierarchy", {"statistics": [[1], [2]]}, "hierarchy.statistics must be one row of token ids"),
        ("adaptive-ngram", {"exploration": -0.5}, "adaptive-ngram.exploration must be an? (integer|number) between"),
    ],
)
def test_settings_out_of_their_range_are_refused(name: str, wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FREE[name](**wrong)


@pytest.mark.parametrize("name", FREE)
def test_defaults_are_within_their_ranges(name: str) -> None:
    drafter = FREE[name]()
    check_numbers(drafter)
    assert drafter.name == name
    assert not drafter.draws
    assert drafter.wants <= {"steps"}
    assert drafter.describe() == name
