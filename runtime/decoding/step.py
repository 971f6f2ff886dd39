"""Steps of the engine for a batch: drafts, one pass, and the next tokens, of each sequence with the options of its own call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runtime.decoding.batch import Batch
from runtime.decoding.sequence import Call, Sequence
from runtime.drafting.drafters.base import Place, Verified
from runtime.drafting.speculation import Speculation, Speculator, likeliest
from runtime.drafting.verify.target import TargetLogits
from runtime.sampling.sampling import next_tokens, seen_tokens
from runtime.sampling.tree import Tree

Parts = list[tuple[Sequence, int]]


class Ready(NamedTuple):
    """A sequence whose next token can be chosen, what was drafted for it, and which rows of logits and hidden states are its."""

    sequence: Sequence
    tree: Tree
    rows: slice
    tokens: slice


@dataclass(slots=True)
class Share:
    """Of a step, what is one call's: new tokens that are decoded, all rows, and pages of its sequences."""

    decoded: int = 0
    rows: int = 0
    pages: int = 0


class Steps:
    """The steps of a batch.

    Attributes:
        parts: of the last step, or of the one that is being computed.
        news: calls that have something to read since `news` was last emptied.
        speculators: of the calls that are there.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch, self.engine = batch, batch.engine
        self.parts: Parts = []
        self._ended = False
        self.news: set[Call] = set()
        self.speculators: dict[Speculation, Speculator] = {}
        self._drafting = 0.0
        self._drafted = False
        self._written = 0

    def run(self) -> None:
        """Compute a step: every token that came of it is in the outputs then."""
        started, self._written, self._ended = time.perf_counter(), 0, False
        batch, parts = self.batch, self.parts
        trees = self._drafts(parts)
        logits, hidden = self._compute(parts, trees)
        assert batch.pages is not None
        shares: defaultdict[Call, Share] = defaultdict(Share)
        chosen: list[Ready] = []
        verified: list[Ready] = []
        decoding = row = token = 0  # where a part's logits and its tokens begin
        for (sequence, count), tree in zip(parts, trees, strict=True):
            share = shares[sequence.call]
            decoded = _count(sequence, count)
            decoding += decoded
            share.decoded += decoded
            share.rows += count
            share.pages += len(sequence.pages)
            speculator = self._speculator(sequence)
            outputs = 1 + len(tree)
            if sequence.rest == count:
                tokens = slice(token + count - 1, token + count + len(tree))
                # What was drafted is verified also where the drafter was switched off meanwhile, by another thread's call maybe.
                learns = speculator is not None and (self._drafted or (speculator.on and speculator.learns))
                each = Ready(sequence, tree, slice(row, row + outputs), tokens)
                (verified if learns else chosen).append(each)
            if (
                hidden is not None
                and speculator is not None
                and speculator.prompts
                and sequence.computed < sequence.prompt
            ):
                states = hidden[token : token + count]
                speculator.read(sequence, sequence.computed, sequence.chunk(count).tokens, states)
            sequence.advance(count, batch.pages)
            row += outputs
            token += count + len(tree)
        for call, share in shares.items():
            if share.pages > call.held:  # no less than the pages that are really different
                sequences = (sequence for sequence in call.sequences if sequence.pages)
                call.held = max(call.held, len({page for sequence in sequences for page in sequence.pages}))
        if verified:
            self._verify(verified, logits, hidden)
        if chosen:
            self._choose(chosen, logits)
        if self._ended:
            batch.end()
        for sequence, _ in parts:
            if sequence.reach == 0:
                batch.evict(sequence)
        if len(self.speculators) == 1 and decoding == sum(count for _, count in parts):
            (speculator,) = self.speculators.values()
            seconds = time.perf_counter() - started - self._drafting
            speculator.timed(row, seconds, self._drafting, self._written)
        now = time.perf_counter()
        for call, share in shares.items():
            call.account(started, now, share.decoded, share.rows)

    def _speculator(self, sequence: Sequence) -> Speculator | None:
        speculation = sequence.call.speculation
        if speculation is None:
            return None
        found = self.speculators.get(speculation)
        if found is None:
            found = self.speculators[speculation] = Speculator(speculation, self.engine)
        return found

    def _compute(self, parts: Parts, trees: Several[Tree]) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = [sequence.chunk(count, tree) for (sequence, count), tree in zip(parts, trees, strict=True)]
        hidden = bool(self.speculators) and any(each.hidden for each in self.speculators.values())
        if not (self._drafted or hidden):
            return self.engine.step(self.batch.pool, chunks), None
        return self.engine.verify(self.batch.pool, chunks, hidden)

    # ---------------------------------------------------------------- drafts
    def _drafts(self, parts: Parts) -> list[Tree]:
        """What is proposed for each part; prompts that are being read get nothing.

        A drafter proposes for the sequences of all calls at once; calls with different ones come one after another, each on top of what
        is drafted already.
        """
        self._drafting = 0.0
        self._drafted = False
        trees = [Tree()] * len(parts)
        if not self.speculators and all(sequence.call.speculation is None for sequence, _ in parts):
            return trees
        rows = sum(count for _, count in parts)
        by_speculator: dict[Speculator, list[int]] = {}
        for place, (sequence, count) in enumerate(parts):
            speculator = self._speculator(sequence)
            if speculator is not None and speculator.on:
                places = by_speculator.setdefault(speculator, [])
                if count == 1 and sequence.decodes:
                    places.append(place)
        for speculator, places in by_speculator.items():
            if len(places) == len(parts) and speculator.rests(len(parts)):
                continue
            started = time.perf_counter()
            for place, tree in zip(
                places, self._propose(speculator, [parts[at][0] for at in places], rows), strict=True
            ):
                trees[place] = tree
                rows += len(tree)
                self._drafted |= len(tree) > 0
            self._drafting += time.perf_counter() - started
        return trees

    def _propose(self, speculator: Speculator, texts: list[Sequence], rows: int) -> list[Tree]:
        pages, pool = self.batch.pages, self.batch.pool
        assert pages is not None
        context, spare = self.engine.context_length, len(self.batch.running)
        # Nothing of the step after which tokens are evicted may be taken back.
        rooms = [max(0, int(min(text.output.left, text.reach - 1)) - 1) for text in texts]
        if context is not None:
            rooms = [
                min(room, context - len(text.tokens) + text.prefix) for room, text in zip(rooms, texts, strict=True)
            ]
        most = self.engine.draft_room(pool)
        if most is not None:
            rooms = [min(room, most) for room in rooms]

        def place(index: int, count: int) -> Place:
            text = texts[index]
            room = 1 + text.stretch(count, pages, spare)
            return Place(self.engine, pool, text.pages, text.computed, room)

        found = speculator.propose(texts, rooms, rows, place)
        return [
            tree.first(text.stretch(len(tree), pages, spare)) if len(tree) else tree
            for text, tree in zip(texts, found, strict=True)
        ]

    def _verify(self, ready: Several[Ready], logits: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """What follows each sequence, with what is accepted of its draft."""
        pages = self.batch.pages
        assert pages is not None
        greedy = [_is_greedy(each.sequence) for each in ready]
        best = likeliest(logits) if any(greedy) else None
        for (sequence, tree, rows, tokens), plain in zip(ready, greedy, strict=True):
            speculator = self._speculator(sequence)
            assert speculator is not None
            mine = logits[rows]
            known = best[rows] if plain and best is not None else None
            target = TargetLogits(mine, sequence.options, sequence.generator, _seen(sequence, logits), known)
            verdict = speculator.accept(tree, target)
            path = verdict.path
            if path:
                # The last token was computed with the tree: its place is the one before the root's children.
                self.engine.keep(self.batch.pool, sequence.chunk(0), path)
            new = self._append(sequence, [*(tree.tokens[node] for node in path), verdict.token])
            sequence.advance(min(len(new), len(path)), pages)
            sequence.high = max(sequence.high, sequence.computed)
            states = None if hidden is None else hidden[tokens]
            speculator.learn(Verified(sequence, tree, path, new, mine, states), sequence.stats)
            self._leave(sequence)

    # ---------------------------------------------------------------- tokens
    def _choose(self, ready: Several[Ready], logits: torch.Tensor) -> None:
        """The next token of each sequence, those with the same options together."""
        groups: dict[tuple[object, ...], list[Ready]] = {}
        if len(ready) == 1:
            groups[()] = list(ready)
        else:
            for each in ready:
                groups.setdefault(each.sequence.call.sampling, []).append(each)
        for group in groups.values():
            rows = [each.rows.start for each in group]
            mine = logits
            if len(rows) < len(logits):
                mine = logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]
            sequences = [each.sequence for each in group]
            options, seen = sequences[0].options, None
            if options.repetition_penalty != 1.0:
                seen = torch.stack([_seen(sequence, logits) for sequence in sequences])  # type: ignore[misc]
            draws = [sequence.generator for sequence in sequences if sequence.generator is not None]
            tokens = next_tokens(mine, seen, options, draws)
            if self.engine.ranks is not None:
                tokens = self.engine.ranks.chosen(tokens)
            for sequence, token in zip(sequences, tokens.tolist(), strict=True):
                self._append(sequence, [token])
                self._leave(sequence)

    def _append(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Add tokens until the sequence ends; returns those that were added."""
        output, call, stats = sequence.output, sequence.call, sequence.stats
        if not output.produced:
            stats.first_tokens += 1
        for count, token in enumerate(tokens, 1):
            sequence.tokens.append(token)  # first: it is what `Sequence.restore` goes by
            output.push(token)
            if sequence.seen is not None:
                sequence.seen[token] = True
            if output.finished:
                tokens = tokens[:count]
                break
        stats.new_tokens += len(tokens)
        call.ahead += len(tokens)
        self._written += len(tokens)
        if call.streams:
            self.news.add(call)
        return tokens

    def _leave(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that has ended."""
        if not sequence.output.finished:
            return
        assert self.batch.pages is not None
        sequence.leave(self.batch.pages)
        sequence.call.open -= 1
        self._ended = True
        self.news.add(sequence.call)
        speculator = self._speculator(sequence)
        if speculator is not None:
            speculator.end(sequence)


def _is_greedy(sequence: Sequence) -> bool:
    options = sequence.options
    return not options.temperature and options.repetition_penalty == 1.0


def _seen(sequence: Sequence, logits: torch.Tensor) -> torch.Tensor | None:
    """Bool `[vocab]`, the tokens of the sequence; None where nobody asks."""
    if sequence.options.repetition_penalty != 1.0 and sequence.seen is None:
        sequence.seen = seen_tokens(sequence.tokens[sequence.prefix :], logits)
    return sequence.seen


def _count(sequence: Sequence, count: int) -> int:
    """Book `count` tokens that are being computed; returns how many of them are decoded ones (not of a prompt, not again)."""
    stats, start, end = sequence.stats, sequence.computed, sequence.computed + count
    prefix = sequence.prefix  # whose tokens are not counted
    shared = min(start, sequence.prompt) - max(sequence.high, prefix)  # found in pages of others
    if shared > 0:
        stats.shared_prompt_tokens += shared
        stats.prompt_tokens += shared
    new = sequence.high = max(start, sequence.high)
    if start < new:
        stats.recomputed_tokens += min(new, end) - start
    sequence.high = max(end, sequence.high)
    if new < sequence.prompt:
        stats.prompt_tokens += max(0, min(end, sequence.prompt) - max(new, prefix))
    return max(0, end - max(new, sequence.prompt))
