"""One call of generate or stream: prompts read, options checked, outputs waiting to be filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from runtime.decoding.loop import decode, groups
from runtime.decoding.memory import cache_bound, pool_pages
from runtime.decoding.scheduler import Scheduler
from runtime.decoding.speculative_loop import decode_speculatively
from runtime.decoding.turns import Caller, Turns
from runtime.drafting.speculation import Speculation
from runtime.engines.base import Engine, PagedEngine
from runtime.errors import RequestError
from runtime.sampling.options import DEFAULT_NEW_TOKENS, GenerationOptions
from runtime.sampling.output import SequenceOutput
from runtime.sampling.prompts import Prompts
from runtime.sampling.stats import GenerationStats
from runtime.sampling.text import StopStrings


class Request:
    """Everything that can be wrong with a call is found when it is made, before any work.

    Args:
        turns: of the model; calls in other threads take turns with this one.
        tokenizer: None when the model has none.
        eos: tokens that end a text.
        path: the model's directory, for messages.
        speculation: of the model; None: plain decoding.

    Attributes:
        outputs: one a prompt, in the order of the prompts.
    """

    def __init__(
        self,
        engine: Engine,
        turns: Turns,
        prompts: Prompts,
        options: GenerationOptions,
        tokenizer: Any,
        eos: Collection[int],
        path: Path,
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation
        self.prompts = prompts
        self.progress = options.progress
        self._engine = engine
        self._turns = turns
        self._options = options
        self._seeds = seeds_of(options, len(prompts.ids))
        if options.stop and tokenizer is None:
            raise RequestError(f"stop needs a tokenizer, and {path} has none")
        used = tokenizer if prompts.are_text or options.stop else None
        ends = frozenset() if options.ignore_eos else frozenset(eos)
        stops = StopStrings(options.stop)
        rooms = [
            room(len(ids), options.max_new_tokens, engine.context_length, prompts.name(i))
            for i, ids in enumerate(prompts.ids)
        ]
        self._pages: int | None = None
        self._needs: list[int] | None = None  # bytes that each prompt's cache takes, and how many all of a group may
        self._bound = 0
        held = getattr(engine, "held", None)
        if isinstance(engine, PagedEngine):
            # The last new token never enters the cache.
            positions = [len(ids) + new - 1 for ids, new in zip(prompts.ids, rooms, strict=True)]
            drafting = speculation if speculation is not None and speculation.off is None else None
            nodes = 0 if drafting is None else getattr(drafting.lengths, "nodes", 1)
            self._pages = pool_pages(engine, positions, options.cache_memory, nodes)
        elif held is not None:
            self._needs = [held.need(len(ids), new) for ids, new in zip(prompts.ids, rooms, strict=True)]
            self._bound = cache_bound(engine, self._needs, options.cache_memory)
        elif options.cache_memory is not None:
            raise RequestError(f"cache_memory needs an engine with a paged KV cache, and {path} runs on one without")
        self.outputs = [
            SequenceOutput(ids, new, ends, used, stops) for ids, new in zip(prompts.ids, rooms, strict=True)
        ]

    def run(self, store: Callable[[GenerationStats], None]) -> Generator[int, None, None]:
        """Decode; yields after every step how many prompts ended in it. The statistics are stored however it ends."""
        stats = GenerationStats()
        try:
            yield from self._paged(stats) if self._pages is not None else self._padded(stats)
        finally:
            stats.finish_reasons = tuple(output.finish_reason or "stopped by the caller" for output in self.outputs)
            store(stats)

    def _paged(self, stats: GenerationStats) -> Iterator[int]:
        engine, pages = self._engine, self._pages
        assert isinstance(engine, PagedEngine)
        assert pages is not None
        caller = Caller(self._turns)
        scheduler = Scheduler(
            engine, pages, self.prompts.ids, self._options, self.outputs, self._seeds, stats, caller, self._speculation
        )
        return scheduler.run()

    def _padded(self, stats: GenerationStats) -> Iterator[int]:
        ids, caller, speculation = self.prompts.ids, Caller(self._turns), self._speculation
        lengths = [len(prompt) for prompt in ids]
        for rows in groups(lengths, self._engine.padding_is_exact, self._needs, self._bound):
            group = (
                self._engine,
                [ids[i] for i in rows],
                self._options,
                [self.outputs[i] for i in rows],
                [self._seeds[i] for i in rows],
                stats,
            )
            # Over compressed caches drafts are verified text by text, while one pass gives every text of a group a token.
            pays = self._needs is None or len(rows) == 1
            if speculation is not None and speculation.off is None and pays:
                yield from decode_speculatively(*group, speculation, caller)
            else:
                yield from decode(*group, caller)


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
