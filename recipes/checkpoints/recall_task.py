"""Synthetic retrieval over a context: examples whose answers are known, for training and for evaluation.

An example is a *context* of exactly ``length`` tokens and several *questions* about it.  Somewhere in the context
stand key-value pairs ``MARK k1 k2 v1 v2``; a question is ``ASK k1 k2`` and its answer ``v1 v2``.  There are two tasks:

``recall``
    the context is full of pairs, one after the other (102 pairs in 512 tokens, 818 in 4096);
``needle``
    the context is text, with 4 to 16 pairs at random places.

The tokens are those of the bundled tokenizer: the two markers are byte tokens that no UTF-8 text contains, the keys and
values are ordinary words of two disjoint pools, which also occur in the text.  A key (its pair of tokens) occurs once
in a context.  Every context begins with at least one end-of-text token.

Examples are drawn by ``(split, task, length, seed, index)`` and by nothing else: the same arguments give the same
example, and no seed of one split is a seed of the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from corpus import EOS, TEXT_DIR, encode_text

Task = Literal["recall", "needle"]
Split = Literal["train", "eval"]

TASKS: tuple[Task, ...] = ("recall", "needle")
LENGTHS = (512, 1024, 2048, 4096)
SPLITS: tuple[Split, ...] = ("train", "eval")

KEY_TOKENS = 2
VALUE_TOKENS = 2
PAIR_TOKENS = 1 + KEY_TOKENS + VALUE_TOKENS
QUESTION_TOKENS = 1 + KEY_TOKENS
POOL_SIZE = 256
NEEDLES = (4, 16)

#: How byte-level BPE spells the bytes 0xFE and 0xFF, which never occur in UTF-8.
MARK_TOKEN, ASK_TOKEN = "\u00fe", "\u00ff"


@dataclass(frozen=True)
class Vocabulary:
    """The token ids the tasks are made of; ``keys`` and ``values`` are int64 arrays of ``POOL_SIZE`` ids each."""

    mark: int
    ask: int
    eos: int
    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Choose the ids from a byte-level BPE tokenizer: the words of a space and three or more lower-case letters."""
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        words = sorted(index for token, index in vocabulary.items() if re.fullmatch(r"\u0120[a-z]{3,}", token))
        if len(words) < 2 * POOL_SIZE:
            raise ValueError(f"the tokenizer has {len(words)} words, and {2 * POOL_SIZE} are needed")
        # Alternating, so that both pools hold frequent and rare words.
        keys, values = words[0 : 2 * POOL_SIZE : 2], words[1 : 2 * POOL_SIZE : 2]
        return cls(
            mark=vocabulary[MARK_TOKEN],
            ask=vocabulary[ASK_TOKEN],
            eos=vocabulary[EOS],
            keys=np.array(keys, dtype=np.int64),
            values=np.array(values, dtype=np.int64),
        )


@dataclass(frozen=True)
class Question:
    """One question: ``ids`` int64 ``[3]`` (``ASK k1 k2``), ``answer`` int64 ``[2]`` (``v1 v2``).

    ``position`` is where its pair (the ``MARK``) stands in the context.
    """

    ids: np.ndarray
    answer: np.ndarray
    position: int


@dataclass(frozen=True)
class Example:
    """A context, int64 ``[length]``, and the questions about it, in the order in which they are asked."""

    context: np.ndarray
    questions: tuple[Question, ...]

    def row(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the context with all questions and answers: ids int64 ``[n]`` and which are answers, bool ``[n]``."""
        parts = [self.context]
        for question in self.questions:
            parts += [question.ids, question.answer]
        is_answer = np.zeros(QUESTION_TOKENS + VALUE_TOKENS, dtype=bool)
        is_answer[QUESTION_TOKENS:] = True
        before = np.zeros(len(self.context), dtype=bool)
        return np.concatenate(parts), np.concatenate([before, np.tile(is_answer, len(self.questions))])


@dataclass(frozen=True)
class Batch:
    """Rows of equal length: ``ids`` int64 ``[rows, n]``, ``is_answer`` and ``is_text`` bool ``[rows, n]``.

    ``is_text`` marks the tokens of running text; the first ``context`` tokens of every row are its context.
    """

    ids: torch.Tensor
    is_answer: torch.Tensor
    is_text: torch.Tensor
    context: int


def random_generator(split: Split, task: Task, length: int, seed: int, index: int) -> np.random.Generator:
    """Return the generator of one example; different arguments give independent generators."""
    return np.random.default_rng([SPLITS.index(split), TASKS.index(task), length, seed, index])


def draw_keys(vocabulary: Vocabulary, count: int, taken: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return ``count`` different keys, int64 ``[count, 2]``, none of them among the codes ``taken``.

    The code of a key is ``k1 * 65536 + k2``, as :func:`bigrams` computes it.
    """
    size = len(vocabulary.keys)
    # More than are needed, as some may be taken.
    chosen = generator.choice(size * size, size=2 * count + 64, replace=False)
    pairs = np.stack([vocabulary.keys[chosen // size], vocabulary.keys[chosen % size]], axis=1)
    free = pairs[~np.isin(pairs[:, 0] * 65536 + pairs[:, 1], taken)]
    if len(free) < count:
        raise ValueError(f"{count} keys are needed, and only {len(free)} of those drawn do not occur in the text")
    return free[:count]


def bigrams(ids: np.ndarray) -> np.ndarray:
    """Return one code for each two neighbouring tokens of ``ids`` ``[n]``: int64 ``[n - 1]``."""
    return ids[:-1].astype(np.int64) * 65536 + ids[1:]


def make_pairs(vocabulary: Vocabulary, count: int, text: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return ``count`` pairs ``MARK k1 k2 v1 v2``, int64 ``[count, 5]``, whose keys do not occur in ``text``."""
    keys = draw_keys(vocabulary, count, bigrams(text), generator)
    values = generator.choice(vocabulary.values, size=(count, VALUE_TOKENS))
    return np.concatenate([np.full((count, 1), vocabulary.mark), keys, values], axis=1)


def ask(vocabulary: Vocabulary, pair: np.ndarray, position: int) -> Question:
    """Return the question about one pair ``[5]`` which stands at ``position``."""
    ids = np.concatenate([[vocabulary.ask], pair[1:QUESTION_TOKENS]])
    return Question(ids.astype(np.int64), pair[QUESTION_TOKENS:].astype(np.int64), position)


def recall_context(vocabulary: Vocabulary, length: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Return a context full of pairs ``[length]``, the pairs ``[count, 5]`` and where they stand ``[count]``."""
    count = (length - 1) // PAIR_TOKENS
    pairs = make_pairs(vocabulary, count, np.zeros(1, dtype=np.int64), generator)
    begin = length - count * PAIR_TOKENS
    context = np.concatenate([np.full(begin, vocabulary.eos), pairs.ravel()])
    return context, pairs, begin + PAIR_TOKENS * np.arange(count)


def needle_context(
    vocabulary: Vocabulary, length: int, text: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Return text with pairs in it ``[length]``, the pairs ``[count, 5]`` and where they stand ``[count]``."""
    low, high = NEEDLES
    # At most a third of a short context is pairs, so that there is text between them.
    count = max(1, min(int(generator.integers(low, high + 1)), length // (3 * PAIR_TOKENS)))
    size = length - 1 - count * PAIR_TOKENS
    start = int(generator.integers(len(text) - size + 1))
    window = text[start : start + size]
    pairs = make_pairs(vocabulary, count, window, generator)
    cuts = np.sort(generator.integers(0, size + 1, size=count))
    pieces = [np.array([vocabulary.eos])]
    for before, pair in zip(np.split(window, cuts), [*pairs, pairs[:0].ravel()], strict=True):
        pieces += [before, pair]
    return np.concatenate(pieces), pairs, 1 + cuts + PAIR_TOKENS * np.arange(count)


def make_example(
    vocabulary: Vocabulary,
    task: Task,
    length: int,
    questions: int,
    *,
    text: np.ndarray,
    generator: np.random.Generator,
) -> Example:
    """Return one example with a context of ``length`` tokens.

    ``text`` is a stream of token ids, int64 ``[n]`` with ``n >= length``, from which ``needle`` takes a window.  The
    questions are about different pairs while there are any, in random order, and then about some of them again.
    """
    if task == "recall":
        context, pairs, positions = recall_context(vocabulary, length, generator)
    else:
        context, pairs, positions = needle_context(vocabulary, length, text, generator)
    order = np.concatenate([generator.permutation(len(pairs)) for _ in range(-(-questions // len(pairs)))])[:questions]
    asked = tuple(ask(vocabulary, pairs[index], int(positions[index])) for index in order)
    return Example(context.astype(np.int64), asked)


def evaluation_set(
    vocabulary: Vocabulary,
    task: Task,
    length: int,
    *,
    text: np.ndarray,
    examples: int = 32,
    questions: int = 8,
    seed: int = 0,
) -> list[Example]:
    """Return the examples of one cell of the benchmark: ``examples`` contexts of ``length`` tokens.

    ``text`` must be a text the model was not trained on: the stream of :func:`load_text`.
    """
    return [
        make_example(
            vocabulary,
            task,
            length,
            questions,
            text=text,
            generator=random_generator("eval", task, length, seed, index),
        )
        for index in range(examples)
    ]


def training_batch(
    vocabulary: Vocabulary, length: int, rows: int, questions: int, *, text: np.ndarray, seed: int, index: int
) -> Batch:
    """Return batch ``index`` of training rows, both tasks in turn: ``rows`` rows of ``length + 5 * questions``."""
    ids: list[np.ndarray] = []
    is_answer: list[np.ndarray] = []
    for row in range(rows):
        task = TASKS[(row + index) % len(TASKS)]
        generator = random_generator("train", task, length, seed, index * 65536 + row)
        example = make_example(vocabulary, task, length, questions, text=text, generator=generator)
        for found, part in zip((ids, is_answer), example.row(), strict=True):
            found.append(part)
    tokens = torch.from_numpy(np.stack(ids))
    is_text = text_mask(vocabulary, tokens, length)
    is_text[rows_of("recall", index)] = False
    return Batch(tokens, torch.from_numpy(np.stack(is_answer)), is_text, length)


def rows_of(task: Task, index: int) -> slice:
    """Return which rows of training batch ``index`` have the examples of ``task``."""
    return slice((TASKS.index(task) - index) % len(TASKS), None, len(TASKS))


def text_mask(vocabulary: Vocabulary, ids: torch.Tensor, context: int) -> torch.Tensor:
    """Return which of ``ids`` ``[rows, n]`` are text: in the context, not in a pair, not the first token."""
    in_pair = ids == vocabulary.mark
    for _ in range(PAIR_TOKENS - 1):
        in_pair[:, 1:] |= in_pair[:, :-1].clone()
    in_pair[:, 0] = True
    in_pair[:, context:] = True
    return ~in_pair


def load_text(tokenizer: Any, path: Path = TEXT_DIR / "heldout.txt") -> np.ndarray:
    """Return the token ids of a bundled text as one stream, int64 ``[n]``, the end-of-text tokens included."""
    return encode_text(tokenizer, path.read_text(encoding="utf-8"))
