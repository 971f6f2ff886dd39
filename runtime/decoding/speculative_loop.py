"""Speculative decoding for engines with a cache of their own: as `runtime.decoding.loop`, but a pass verifies what was drafted for each
text of the group, and texts grow by different numbers of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.decoding.loop import pad_left
from runtime.decoding.turns import Caller, Turns
from runtime.drafting.speculation import Speculation, Speculator
from runtime.drafting.verify.base import Verdict
from runtime.engines.base import Chunk, DraftingEngine, Engine, Step
from runtime.sampling.options import GenerationOptions
from runtime.sampling.output import SequenceOutput
from runtime.sampling.sampling import generators, next_tokens, seen_tokens
from runtime.sampling.stats import GenerationStats
from runtime.sampling.tree import ROOT, Tree


def decode_speculatively(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    outputs: Sequence[SequenceOutput],
    seeds: Sequence[int],
    stats: GenerationStats,
    speculation: Speculation,
    caller: Caller | None = None,
) -> Iterator[int]:
    """Fill `outputs` until all are finished, with the tokens of `decode`; yields after every step how many ended in it.

    Args:
        engine: a `DraftingEngine`.
        prompts: token ids of each sequence, at least one each; one sequence where the engine's cache is compressed.
        outputs: one a prompt; each says when its sequence is over.
        seeds: one a prompt; used when `options.temperature` is above 0.
        stats: times, token counts and cache size are added to it, also when the caller stops early.
        speculation: of the model.
        caller: whose turn it is, where threads share the engine.

    Raises:
        RequestError: the engine verifies no drafts for this model.
    """
    if not isinstance(engine, DraftingEngine):
        raise TypeError(f"{type(engine).__name__} verifies no drafts")  # refused when the model was loaded
    rows = zip(prompts, outputs, generators(options, seeds), strict=True)
    texts = [_Text(list(prompt), len(prompt), output, source) for prompt, output, source in rows]
    return _Loop(engine, texts, options, stats, caller or Caller(Turns()), speculation).run()


@dataclass(eq=False)
class _Text:
    """One sequence: see `runtime.drafting.drafters.base.Text`.

    Attributes:
        seen: bool `[vocab]`, its tokens, for the repetition penalty; None: nobody asks.
    """

    tokens: list[int]
    prompt: int
    output: SequenceOutput
    source: torch.Generator | None
    seen: torch.Tensor | None = None

    def piece(self, tree: Tree) -> Chunk:
        """The last token, and what may follow it."""
        parents = None if tree.is_chain else [-1, *(parent - ROOT for parent in tree.parents)]
        return Chunk([self.tokens[-1], *tree.tokens], len(self.tokens) - 1, (), 1 + len(tree), parents)

    def push(self, new: Sequence[int]) -> int:
        """Tokens that follow, as long as it is not finished; returns how many."""
        for count, token in enumerate(new, 1):
            self.output.push(token)
            self.tokens.append(token)
            if self.seen is not None:
                self.seen[token] = True
            if self.output.finished:
                return count
        return len(new)


class _Loop:
    """The texts of a group.

    Attributes:
        texts: that are not finished, in the order of the cache's rows.
    """

    def __init__(
        self,
        engine: DraftingEngine,
        texts: list[_Text],
        options: GenerationOptions,
        stats: GenerationStats,
        caller: Caller,
        speculation: Speculation,
    ) -> None:
        self.texts = texts
        self._engine, self._options, self._stats, self._caller = engine, options, stats, caller
        self._drafts = engine.new_drafts(len(texts), "hidden" in speculation.drafter.wants)
        self._speculator = Speculator(
            speculation, options, stats, self._drafts.trees, self._drafts.most_rows, engine.vocab_size
        )

    def run(self) -> Iterator[int]:
        """Yields after every step how many texts ended in it."""
        stats, caller, speculator, drafts = self._stats, self._caller, self._speculator, self._drafts
        stats.sequences += len(self.texts)
        started = time.perf_counter()
        try:
            ids, mask, positions = pad_left([text.tokens for text in self.texts], self._engine.device)
            step = self._prompts(caller.run(drafts.read, ids, mask, positions))
            trees = [Tree() for _ in self.texts]
            paths = self._accept(trees, step)
            stats.first_tokens += len(self.texts)
            stats.cache_bytes = max(stats.cache_bytes, drafts.nbytes)
            alive = self._alive()
            stats.prefill_seconds += time.perf_counter() - started
            yield len(self.texts) - len(alive)
            while alive:
                started, written = time.perf_counter(), stats.new_tokens
                self._go_on(alive, paths)
                trees, drafting = self._draft()
                step = caller.run(
                    drafts.verify, [text.piece(tree) for text, tree in zip(self.texts, trees, strict=True)]
                )
                paths = [[0, *(node - ROOT for node in path)] for path in self._accept(trees, step)]
                alive = self._alive()
                seconds = time.perf_counter() - started
                speculator.timed(len(step.logits), seconds - drafting, drafting, stats.new_tokens - written)
                stats.decode_seconds += seconds
                yield len(self.texts) - len(alive)
        finally:
            # No turn is taken here: a stream may be thrown away anywhere, in the middle of somebody's step too.
            stats.cache_bytes = max(stats.cache_bytes, drafts.nbytes)
            speculator.close()

    def _alive(self) -> list[int]:
        return [row for row, text in enumerate(self.texts) if not text.output.finished]

    # ---------------------------------------------------------------- prompts
    def _prompts(self, step: Step) -> Step:
        """The drafter reads prompts where it wants to; what is left are the last tokens' hidden states."""
        self._stats.prompt_tokens += sum(text.prompt for text in self.texts)
        if step.hidden is None:
            return step
        states = step.hidden.split([text.prompt for text in self.texts])
        if self._speculator.prompts:
            for text, own in zip(self.texts, states, strict=True):
                self._caller.run(self._speculator.read, text, 0, list(text.tokens), own)
        return Step(step.logits, torch.stack([own[-1] for own in states]))

    # ---------------------------------------------------------------- a step
    def _go_on(self, alive: list[int], paths: list[list[int]]) -> None:
        """Finished texts leave; of the others the cache keeps what was accepted."""
        if len(alive) < len(self.texts):
            self._stats.cache_bytes = max(self._stats.cache_bytes, self._drafts.nbytes)
            self._caller.run(self._drafts.keep_rows, alive)
            self.texts = [self.texts[row] for row in alive]
            paths = [paths[row] for row in alive]
        if any(paths):
            self._caller.run(self._drafts.keep, paths)

    def _draft(self) -> tuple[list[Tree], float]:
        """What is proposed for each text, and what that took."""
        started = time.perf_counter()
        speculator, texts = self._speculator, self.texts
        if not speculator.on:
            return [Tree() for _ in texts], 0.0
        room = self._drafts.room()
        most = self._drafts.most_rows // len(texts) - 1 if room is None else room
        # An output takes no more tokens than the context has places, and the last one is the target's own.
        rooms = [text.output.left - 1 if room is None else min(text.output.left - 1, room) for text in texts]
        sources = [text.source for text in texts]
        trees = self._caller.run(speculator.propose, texts, rooms, sources, len(texts))
        return [tree.first(max(0, most)) for tree in trees], time.perf_counter() - started

    def _accept(self, trees: list[Tree], step: Step) -> list[list[int]]:
        """What follows each text is put at its end; returns the nodes that were accepted."""
        verdicts = self._verdicts(trees, step.logits)
        news = []
        for text, tree, (path, token) in zip(self.texts, trees, verdicts, strict=True):
            new = [*(tree.tokens[node] for node in path), token]
            news.append(new[: text.push(new)])
            self._speculator.count(tree, path, len(news[-1]))
        self._stats.new_tokens += sum(map(len, news))
        self._stats.steps += 1
        paths = [verdict.path for verdict in verdicts]
        if self._speculator.on:
            self._caller.run(self._learn, trees, paths, news, step)
        return paths

    def _learn(self, trees: list[Tree], paths: list[list[int]], news: list[list[int]], step: Step) -> None:
        speculator, row = self._speculator, 0
        for text, tree, path, new in zip(self.texts, trees, paths, news, strict=True):
            rows = slice(row, row + 1 + len(tree))
            row = rows.stop
            states = None if step.hidden is None else step.hidden[rows]
            speculator.learn(text, tree, path, new, step.logits[rows], states)
            if text.output.finished:
                speculator.end(text)

    def _verdicts(self, trees: list[Tree], logits: torch.Tensor) -> list[Verdict]:
        options, texts = self._options, self.texts
        if options.repetition_penalty != 1.0:
            for text in texts:
                text.seen = seen_tokens(text.tokens, logits) if text.seen is None else text.seen
        if not any(map(len, trees)):  # as in plain decoding, all at once
            seen = [text.seen for text in texts if text.seen is not None]
            sources = [text.source for text in texts if text.source is not None]
            tokens = next_tokens(logits, torch.stack(seen) if seen else None, options, sources).tolist()
            return [Verdict([], token) for token in tokens]
        best = self._speculator.greedy(logits)
        verdicts, row = [], 0
        for text, tree in zip(texts, trees, strict=True):
            rows = slice(row, row + 1 + len(tree))
            row = rows.stop
            known = None if best is None else best[rows]
            verdicts.append(self._speculator.accept(tree, logits[rows], text.source, text.seen, known))
        return verdicts
