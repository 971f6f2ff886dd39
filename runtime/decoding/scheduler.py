"""Continuous batching over a paged KV cache: any number of requests, as many at a time as there is room for.

Every step takes one token of each sequence that decodes, and fills up with tokens of prompts. A request comes in when another
ends. One whose beginning is being computed by another waits for that instead of computing it too. When pages run out, the
youngest sequence gives its own up and is computed again later; its tokens and its random numbers stay, so that its output
is the same. The oldest always gets its way, so that every call ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from runtime.decoding.pages import Pages, PrefixCache
from runtime.decoding.sequence import Sequence
from runtime.decoding.turns import Caller
from runtime.drafting.drafters.base import Place, Verified
from runtime.drafting.speculation import Speculation, Speculator
from runtime.drafting.verify.target import TargetLogits
from runtime.engines.base import Chunk, Engine
from runtime.sampling.options import GenerationOptions
from runtime.sampling.sampling import next_tokens, seen_tokens
from runtime.sampling.stats import GenerationStats
from runtime.sampling.tree import Tree

# Sequences that decode together. Beyond it the weights are read for nothing more, while every sequence takes memory.
MOST_SEQUENCES = 256


class Ready(NamedTuple):
    """A sequence whose next token can be chosen, what was drafted for it, and which rows of logits and hidden states are its."""

    sequence: Sequence
    tree: Tree
    rows: slice
    tokens: slice


class Scheduler:
    """The requests of one call, and the pages they share.

    Args:
        pages: how many pages the pool has; every single request must fit in it (`runtime.decoding.memory`).
        sequences: the requests, in their order; each output says when its sequence is over.
        stats: counted in, also when the caller stops early.
        caller: whose turn it is, where threads share the engine.
        speculation: of the model; None: every step gives a sequence one token.
        prefixes: of a session; None: nothing outlives the call.
    """

    def __init__(
        self,
        engine: Engine,
        pages: int,
        sequences: Iterable[Sequence],
        options: GenerationOptions,
        stats: GenerationStats,
        caller: Caller,
        speculation: Speculation | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.pages = Pages(pages, engine.page_size)
        self._engine = engine
        self._options = options
        self._stats = stats
        self._caller = caller
        self._most_sequences = max(1, min(MOST_SEQUENCES, engine.most_rows // 2))
        chunk = None if engine.lockstep else options.prefill_chunk
        self._chunk = min(chunk or engine.most_rows, engine.most_rows)
        # Both in the order of the request, and all of `_running` before all of `_waiting`: who runs is never younger than
        # who waits. That is why nobody ever waits for a page of a sequence that was put aside.
        self._waiting = deque(sequences)
        self._running: list[Sequence] = []
        self._no_room = False  # for the next in line, until somebody ends
        self._speculator: Speculator | None = None
        if speculation is not None:
            self._speculator = Speculator(speculation, options, stats, engine)
        # A batch of rows can only be continued where it is one row, and takes none of its tokens back where it has drafts.
        if engine.lockstep and (speculation is not None or len(self._waiting) > 1):
            prefixes = None
        self._prefixes = prefixes
        self._reuses = False

    def run(self) -> Iterator[int]:
        """Fill the outputs until all are finished; yields after every step how many ended in it."""
        stats, engine, pool = self._stats, self._engine, None
        stats.sequences += len(self._waiting)
        drafts = self._speculator is not None
        self._reuses = self._prefixes is not None and self._prefixes.lock.acquire(blocking=False)
        try:
            if self._prefixes is not None and self._reuses:
                self.pages, pool = self._caller.run(self._prefixes.take, self.pages, drafts, engine.new_pages)
            else:
                pool = self._caller.run(engine.new_pages, self.pages.count, drafts)
            while self._running or self._waiting:
                yield self._step(pool)
        finally:
            # No turn is taken here: a stream may be thrown away anywhere, in the middle of somebody's step too.
            if pool is not None:
                usage = engine.usage(pool, self.pages.touched)
                stats.cache_bytes = max(stats.cache_bytes, usage.bytes)
                stats.read_tokens += usage.read_tokens
                stats.held_tokens += usage.held_tokens
            for sequence in self._running:
                sequence.leave(self.pages)
            self._running = []
            self._waiting.clear()
            if self._speculator is not None:
                self._speculator.close()
            if self._prefixes is not None and self._reuses:
                self._reuses = False
                self._prefixes.lock.release()

    # ---------------------------------------------------------------- a step
    def _step(self, pool: Any) -> int:
        started, written = time.perf_counter(), self._stats.new_tokens
        self._admit(pool)
        parts = self._pack()
        trees = self._drafts(pool, parts)
        logits, hidden = self._compute(pool, parts, trees)
        stats, speculator = self._stats, self._speculator
        decoding = 0
        ready: list[Ready] = []
        row = token = 0  # where a part's logits and its tokens begin
        for (sequence, count), tree in zip(parts, trees, strict=True):
            decoding += self._count(sequence, count)
            outputs = 1 + len(tree)
            if sequence.rest == count:
                tokens = slice(token + count - 1, token + count + len(tree))
                ready.append(Ready(sequence, tree, slice(row, row + outputs), tokens))
            if (
                hidden is not None
                and speculator is not None
                and speculator.prompts
                and sequence.computed < sequence.prompt
            ):
                states = hidden[token : token + count]
                self._caller.run(speculator.read, sequence, sequence.computed, sequence.chunk(count).tokens, states)
            sequence.advance(count, self.pages)
            row += outputs
            token += count + len(tree)
        # What was drafted is verified also where the drafter was switched off meanwhile, by another thread's call maybe.
        if speculator is not None and (self._drafted or (speculator.on and speculator.learns)):
            ended = self._verify(pool, speculator, ready, logits, hidden)
        else:
            if len(ready) < len(parts):
                chosen = [each.rows.start for each in ready]
                logits = logits[torch.tensor(chosen, dtype=torch.int64, device=logits.device)]
            ended = self._choose([each.sequence for each in ready], logits) if ready else 0
        rows = sum(count for _, count in parts)
        if speculator is not None and decoding == rows:
            seconds = time.perf_counter() - started - self._drafting
            speculator.timed(row, seconds, self._drafting, stats.new_tokens - written)
        stats.steps += 1
        seconds = time.perf_counter() - started
        stats.decode_seconds += seconds * decoding / rows
        stats.prefill_seconds += seconds * (rows - decoding) / rows
        return ended

    def _compute(
        self, pool: Any, parts: list[tuple[Sequence, int]], trees: list[Tree]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = [sequence.chunk(count, tree) for (sequence, count), tree in zip(parts, trees, strict=True)]
        speculator = self._speculator
        if speculator is None or not (self._drafted or speculator.hidden):
            return self._caller.run(self._engine.step, pool, chunks), None
        return self._caller.run(self._engine.verify, pool, chunks, speculator.hidden)

    # ---------------------------------------------------------------- drafts
    def _drafts(self, pool: Any, parts: list[tuple[Sequence, int]]) -> list[Tree]:
        """What is proposed for each part; prompts that are being read get nothing."""
        self._drafting = 0.0
        self._drafted = False
        trees = [Tree()] * len(parts)
        speculator = self._speculator
        if speculator is None or not speculator.on:
            return trees
        decoding = [place for place, (sequence, count) in enumerate(parts) if count == 1 and sequence.decodes]
        if len(decoding) == len(parts) and speculator.rests(len(parts)):
            return trees
        started = time.perf_counter()
        texts = [parts[place][0] for place in decoding]
        context = self._engine.context_length
        rooms = [text.output.left - 1 for text in texts]
        if context is not None:
            rooms = [min(room, context - len(text.tokens)) for room, text in zip(rooms, texts, strict=True)]
        most = self._caller.run(self._engine.draft_room, pool)
        if most is not None:
            rooms = [min(room, most) for room in rooms]
        rows = sum(count for _, count in parts)

        def place(index: int, count: int) -> Place:
            text = texts[index]
            room = 1 + text.stretch(count, self.pages, spare=len(self._running))
            return Place(self._engine, pool, text.pages, text.computed, room)

        found = self._caller.run(speculator.propose, texts, rooms, [text.generator for text in texts], rows, place)
        for part, text, tree in zip(decoding, texts, found, strict=True):
            if len(tree):
                trees[part] = tree.first(text.stretch(len(tree), self.pages, spare=len(self._running)))
                self._drafted |= len(trees[part]) > 0
        self._drafting = time.perf_counter() - started
        return trees

    def _verify(
        self, pool: Any, speculator: Speculator, ready: list[Ready], logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> int:
        """What follows each sequence, with what is accepted of its draft; returns how many ended."""
        best = speculator.greedy(logits)
        ended = 0
        for sequence, tree, rows, tokens in ready:
            seen = self._seen(sequence, logits)
            mine = logits[rows]
            known = None if best is None else best[rows]
            verdict = speculator.accept(tree, TargetLogits(mine, self._options, sequence.generator, seen, known))
            path = verdict.path
            if path:
                # The last token was computed with the tree: its place is the one before the root's children.
                accepted = Chunk((), sequence.computed, sequence.pages)
                self._caller.run(self._engine.keep, pool, accepted, path)
            new = self._append(sequence, [*(tree.tokens[node] for node in path), verdict.token])
            sequence.advance(min(len(new), len(path)), self.pages)
            sequence.high = max(sequence.high, sequence.computed)
            states = None if hidden is None else hidden[tokens]
            self._caller.run(speculator.learn, Verified(sequence, tree, path, new, mine, states))
            ended += self._leave(sequence)
        self._forget(ended)
        return ended

    # ---------------------------------------------------------------- tokens
    def _choose(self, chosen: list[Sequence], logits: torch.Tensor) -> int:
        """The next token of each sequence; returns how many ended."""
        options = self._options
        seen = None
        if options.repetition_penalty != 1.0:
            seen = torch.stack([self._seen(sequence, logits) for sequence in chosen])  # type: ignore[misc]
        draws = [sequence.generator for sequence in chosen if sequence.generator is not None]
        ended = 0
        for sequence, token in zip(chosen, next_tokens(logits, seen, options, draws).tolist(), strict=True):
            self._append(sequence, [token])
            ended += self._leave(sequence)
        self._forget(ended)
        return ended

    def _append(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Add tokens until the sequence ends; returns those that were added."""
        output = sequence.output
        if not output.produced:
            self._stats.first_tokens += 1
        for count, token in enumerate(tokens, 1):
            output.push(token)
            sequence.tokens.append(token)
            if sequence.seen is not None:
                sequence.seen[token] = True
            if output.finished:
                tokens = tokens[:count]
                break
        self._stats.new_tokens += len(tokens)
        return tokens

    def _leave(self, sequence: Sequence) -> bool:
        """Whether a sequence has ended; its pages are free then."""
        if sequence.output.finished:
            sequence.leave(self.pages)
        return sequence.output.finished

    def _seen(self, sequence: Sequence, logits: torch.Tensor) -> torch.Tensor | None:
        """Bool `[vocab]`, the tokens of the sequence; None where nobody asks."""
        if self._options.repetition_penalty != 1.0 and sequence.seen is None:
            sequence.seen = seen_tokens(sequence.tokens, logits)
        return sequence.seen

    def _forget(self, ended: int) -> None:
        if ended:
            if self._speculator is not None:
                for sequence in self._running:
                    if sequence.output.finished:
                        self._caller.run(self._speculator.end, sequence)
            self._running = [sequence for sequence in self._running if not sequence.output.finished]
            self._no_room = False

    def _count(self, sequence: Sequence, count: int) -> int:
        """Book `count` tokens that are being computed; returns how many of them are decoded ones (not of a prompt, not again)."""
        stats, start, end = self._stats, sequence.computed, sequence.computed + count
        new = max(start, sequence.high)
        if start < new:
            stats.recomputed_tokens += min(new, end) - start
        sequence.high = max(end, sequence.high)
        if new < sequence.prompt:
            stats.prompt_tokens += max(0, min(end, sequence.prompt) - new)
        return max(0, end - max(new, sequence.prompt))

    # ---------------------------------------------------------------- who takes part
    def _admit(self, pool: Any) -> None:
        """Let requests in while the step has rows for them and the pool pages."""
        if not self._waiting or (self._no_room and self._running):
            return
        free = self._engine.most_rows - sum(sequence.rest for sequence in self._running)
        while self._waiting and free > 0 and len(self._running) < self._most_sequences:
            sequence = self._waiting[0]
            # A page for each that runs is reserved, so that nobody is admitted only to be preempted.
            spare = 0 if self._engine.lockstep else len(self._running)
            if not sequence.enter(self.pages, spare):
                self._no_room = True
                return
            if self._reuses and self._engine.lockstep:
                sequence.computed = self._caller.run(self._engine.resume, pool, sequence.tokens, sequence.pages[0])
            self._waiting.popleft()
            self._running.append(sequence)
            free -= sequence.rest
            shared = min(sequence.computed, sequence.prompt) - sequence.high
            if shared > 0:
                self._stats.shared_prompt_tokens += shared
                self._stats.prompt_tokens += shared
                sequence.high = sequence.computed

    def _pack(self) -> list[tuple[Sequence, int]]:
        """What the step computes: (sequence, number of its next tokens), oldest first, decoding before prompts."""
        parts: list[tuple[Sequence, int]] = []
        for sequence in list(self._running):
            if sequence.rest == 1 and not sequence.waits and self._has_page(sequence):
                parts.append((sequence, 1))
        room = min(self._engine.most_rows - len(parts), self._chunk)
        for sequence in self._running:
            if room <= 0:
                break
            if sequence.rest > 1 and not sequence.waits:
                count = min(sequence.rest, room)
                parts.append((sequence, count))
                room -= count
        if not parts:
            raise RuntimeError("the scheduler has sequences and nothing to compute")  # a mistake in this file
        return parts

    def _has_page(self, sequence: Sequence) -> bool:
        """See to it that the next token has a page; False when the sequence itself had to make room."""
        if not sequence.pages:  # put aside in this very step, for an older one
            return False
        if sequence.full(self.pages):
            while not self.pages.available:
                youngest = self._running.pop()
                youngest.leave(self.pages)
                self._waiting.appendleft(youngest)
                self._stats.preemptions += 1
                if youngest is sequence:
                    return False
            sequence.pages.append(self.pages.take())
        return True
