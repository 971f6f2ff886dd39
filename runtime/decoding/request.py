"""Request: one call of generate or stream, with its prompts read, its options checked, and its batches of prompts to decode together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from runtime.decoding.memory import cache_bound, most_pages, pages_of, pool_pages
from runtime.decoding.scheduler import Scheduler
from runtime.decoding.sequence import Call
from runtime.decoding.sequence import Sequence as Decoded
from runtime.decoding.turns import Turns
from runtime.drafting.speculation import Speculation
from runtime.errors import RequestError
from runtime.sampling.options import DEFAULT_NEW_TOKENS, GenerationOptions
from runtime.sampling.output import SequenceOutput, reporting
from runtime.sampling.prompts import Prompts
from runtime.sampling.sampling import generators
from runtime.sampling.stats import GenerationStats
from runtime.sampling.text import StopStrings

if TYPE_CHECKING:
    from runtime.system.ranks import Ranks

GROUP_ROWS = 64
# Padding that a group may always hold, in tokens, and as a share of its own tokens.
FREE_PADDING = 1024
PADDING_SHARE = 0.25


@dataclass(frozen=True)
class Decoding:
    """What all calls on a model have in common.

    Attributes:
        engine: that computes.
        turns: of the model; what uses the engine takes turns.
        tokenizer: None when the model has none.
        eos: tokens that end a sequence.
        path: the model's directory, for messages.
        speculation: of the model; None: every step gives a sequence one token.
        scheduler: in which the model's calls decode together; None: each has one of its own.
        session: scheduler of a session on an engine with `lockstep`, whose calls may continue what it holds.
    """

    engine: Any
    turns: Turns
    tokenizer: Any
    eos: frozenset[int]
    path: Path
    speculation: Speculation | None = None
    scheduler: Scheduler | None = None
    session: Scheduler | None = None

    @property
    def drafts(self) -> Speculation | None:
        """The speculation, unless it was switched off."""
        return None if self.speculation is None or self.speculation.off is not None else self.speculation


class Request(ABC):
    """One call of generate or stream. Everything that can be wrong with it is found when it is made, before any work.

    Args:
        prompts: one a sequence.
        contexts: token ids before the first new one of each sequence, as far as its text depends on them.
        limits: most new tokens of each sequence.

    Attributes:
        outputs: one a prompt, in the order of the prompts.
    """

    def __init__(
        self,
        decoding: Decoding,
        prompts: Prompts,
        options: GenerationOptions,
        contexts: Iterable[Sequence[int]],
        limits: Sequence[int],
    ) -> None:
        self.prompts = prompts
        self._decoding, self._options = decoding, options
        self._seeds = seeds_of(options, len(prompts.ids))
        if options.stop and decoding.tokenizer is None:
            raise RequestError(f"stop needs a tokenizer, and {decoding.path} has none")
        tokenizer = decoding.tokenizer if prompts.are_text or options.stop else None
        ends = frozenset() if options.ignore_eos else decoding.eos
        stops = StopStrings(options.stop)
        self.outputs = [
            SequenceOutput(ids, limit, ends, tokenizer, stops) for ids, limit in zip(contexts, limits, strict=True)
        ]

    @abstractmethod
    def _steps(self, stats: GenerationStats) -> Iterator[int]:
        """Fill the outputs; yields after every step how many ended in it."""

    def run(self, store: Callable[[GenerationStats], None]) -> Generator[int, None, None]:
        """Decode; yields after every step how many prompts ended in it. The statistics are stored however it ends."""
        stats = GenerationStats()
        try:
            yield from self._steps(stats)
        finally:
            stats.finish_reasons = [output.finish_reason or "stopped by the caller" for output in self.outputs]
            store(stats)

    def complete(self, store: Callable[[GenerationStats], None]) -> Any:
        """Decode all and report progress; a text or token ids, or a list of these for a batch."""
        done = 0
        with reporting(self._options.progress, len(self.outputs)) as report, closing(self.run(store)) as steps:
            for ended in steps:
                done += ended
                report(done)
        results = [output.text if self.prompts.are_text else list(output.tokens) for output in self.outputs]
        return results if self.prompts.are_batch else results[0]


class Group(NamedTuple):
    """Prompts, by their numbers, that decode together, with drafts or without.

    Attributes:
        pages: most that one of them takes. pool: pages of the pool where it is for these prompts alone; None: it is the model's.
    """

    rows: Sequence[int]
    pages: int
    pool: int | None
    drafts: bool = True


class CausalRequest(Request):
    """A call on a causal language model.

    Args:
        streams: what is new is read after each step.
    """

    def __init__(self, decoding: Decoding, prompts: Prompts, options: GenerationOptions, streams: bool = False) -> None:
        engine = decoding.engine
        limits = [
            room(len(ids), options.max_new_tokens, engine.context_length, prompts.name(i))
            for i, ids in enumerate(prompts.ids)
        ]
        super().__init__(decoding, prompts, options, prompts.ids, limits)
        if engine.ranks is not None:
            asked = (prompts.ids, replace(options, progress=False), sorted(decoding.eos), streams)
            self._seeds = seeds_of_ranks(engine.ranks, options, asked, self._seeds)
        self._streams = streams
        self._groups = self._rows(limits) if engine.lockstep else [self._paged(limits)]

    def _steps(self, stats: GenerationStats) -> Iterator[int]:
        decoding, ids = self._decoding, self.prompts.ids
        sources = generators(self._options, self._seeds)
        for group in self._groups:
            prefix = decoding.engine.prefix
            sequences = [Decoded(ids[i], self.outputs[i], sources[i], prefix) for i in group.rows]
            speculation = decoding.drafts if group.drafts else None
            call = Call(sequences, self._options, stats, speculation, streams=self._streams, pages=group.pages)
            yield from self._scheduler(group, call).run(call)

    def _scheduler(self, group: Group, call: Call) -> Scheduler:
        decoding = self._decoding
        if group.pool is None and decoding.scheduler is not None:
            return decoding.scheduler
        # A batch of rows can only be continued where it is one row, and takes none of its tokens back where it has drafts.
        session = decoding.session if call.speculation is None and len(group.rows) == 1 else None
        if session is not None and session.claim(call):
            return session
        return Scheduler(decoding.engine, decoding.turns, group.pool)

    def _paged(self, rooms: Sequence[int]) -> Group:
        """All prompts at once."""
        engine, memory = self._decoding.engine, self._options.cache_memory
        before = len(engine.prefix)
        positions = [engine.slots(before + len(ids), new) for ids, new in zip(self.prompts.ids, rooms, strict=True)]
        drafting, shared = self._decoding.drafts, self._decoding.scheduler
        nodes = 0 if drafting is None else getattr(drafting.lengths, "nodes", 1)
        largest = pages_of(engine, max(positions))
        pool = None
        if memory is not None or shared is None:
            pool = pool_pages(engine, positions, memory, nodes)
        elif not shared.batch.holds(largest):
            most_pages(engine, largest, None, nodes)
        return Group(range(len(positions)), largest, pool)

    def _rows(self, rooms: Sequence[int]) -> list[Group]:
        """Groups of similar lengths, each with a page for every prompt."""
        engine, memory = self._decoding.engine, self._options.cache_memory
        needs, bound = None, 0
        factory = getattr(engine, "cache_factory", None)
        if factory is not None:
            needs = [factory.need(len(ids), new) for ids, new in zip(self.prompts.ids, rooms, strict=True)]
            bound = cache_bound(engine, needs, memory)
        elif memory is not None:
            raise RequestError(
                f"cache_memory needs an engine with a paged KV cache, and {self._decoding.path} runs on one without"
            )
        made = groups([len(ids) for ids in self.prompts.ids], engine.padding_is_exact, needs, bound)
        # Over compressed caches drafts are verified one by one, while one pass gives every sequence of a group a token.
        return [Group(rows, 1, len(rows), factory is None or len(rows) == 1) for rows in made]


def groups(
    lengths: Sequence[int], padding_is_exact: bool, needs: Sequence[int] | None = None, bound: int = 0
) -> list[list[int]]:
    """Which prompts (by index) are decoded together: few enough for memory, and of similar lengths, longest first.

    Args:
        lengths: tokens of each prompt.
        padding_is_exact: False: only prompts of equal length may share a group.
        needs: bytes that each prompt's cache takes; None: nobody knows.
        bound: bytes that all caches of a group may take, where that is known.
    """
    result: list[list[int]] = []
    longest = total = taken = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length, need = lengths[row], needs[row] if needs is not None else 0
        if result and len(result[-1]) < GROUP_ROWS and taken + need <= bound:
            padding = longest * (len(result[-1]) + 1) - (total + length)
            allowed = max(FREE_PADDING, PADDING_SHARE * total) if padding_is_exact else 0
            if padding <= allowed:
                result[-1].append(row)
                total += length
                taken += need
                continue
        result.append([row])
        longest = total = length
        taken = need
    return [sorted(group) for group in result]


def room(prompt: int, wanted: int | None, context: int | None, name: str = "the prompt") -> int:
    """How many tokens to make at most after `prompt` tokens; RequestError when `wanted` or any do not fit the context."""
    if context is None:
        return wanted or DEFAULT_NEW_TOKENS
    left = context - prompt
    if left < 1:
        raise RequestError(
            f"{name} has {prompt} tokens and fills the model's context of {context}: no room for new ones"
        )
    if wanted is None:
        return min(DEFAULT_NEW_TOKENS, left)
    if wanted > left:
        raise RequestError(
            f"max_new_tokens {wanted} and {name} of {prompt} tokens exceed the model's context of {context}: at most {left} fit"
        )
    return wanted


def seeds_of_ranks(ranks: Ranks, options: GenerationOptions, asked: Any, seeds: list[int]) -> list[int]:
    """The seeds of rank 0, for a call that all ranks make alike: with the same of all that is `asked`.

    Raises:
        RequestError: on all ranks, where they do not; or the call could end on one rank alone.
    """
    if options.cancel is not None:
        raise RequestError(
            "cancel: an event of one process cannot end a call that ranks of tensor parallelism compute together"
        )
    ranks.check_call("the prompts or options of a call", asked)
    return ranks.first(seeds)


def seeds_of(options: GenerationOptions, count: int) -> list[int]:
    """One seed a sequence; RequestError when a list of another length was given."""
    if isinstance(options.seed, tuple):
        if len(options.seed) != count:
            raise RequestError(f"seed has {len(options.seed)} entries for {count} prompts")
        return list(options.seed)
    if options.seed is not None:
        return [options.seed] * count
    source = torch.Generator()
    source.seed()  # from the operating system, so that the caller's global random state is left alone
    return torch.randint(2**62, (count,), generator=source).tolist()
