"""Statistics of one call of generate or stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.sampling.tree import ROOT, Tree

_REPORTED = (
    "tokens_per_second", "prefill_tokens_per_second", "prefill_seconds", "decode_seconds", "prompt_tokens", "shared_prompt_tokens",
    "new_tokens", "sequences", "finish_reasons", "cache_bytes", "preemptions", "recomputed_tokens", "steps", "drafted_tokens",
    "accepted_tokens", "acceptance_rate", "acceptance_by_depth", "mean_accepted", "draft_rounds", "reached_by_depth",
    "accepted_by_depth", "draft_seconds",
)  # fmt: skip


@dataclass
class GenerationStats:
    """Counts and wall-clock seconds.

    The time in which the caller of a stream does something else is not counted; waiting for other calls' steps is. A step that calls
    share counts in full in each of them. A step that reads prompts of some sequences of the call and decodes others is divided between
    the two by their tokens.

    Attributes:
        sequences: prompts in the call.
        prompt_tokens, new_tokens: sums over the prompts, as far as they were read and decoded.
        first_tokens: new tokens that came out of the prefill (one a sequence).
        shared_prompt_tokens: those of `prompt_tokens` that were not computed because they are a prefix of another sequence, of any call
            that runs or whose cache is still there.
        preemptions: how often a sequence gave up its cache because memory was needed by an older one.
        recomputed_tokens: tokens that were computed again for that reason.
        steps: runs of the engine that computed something of the call.
        prefill_seconds: reading prompts, until the first tokens were chosen. decode_seconds: everything after.
        cache_bytes: the KV cache of its sequences at its largest, what they share counted once.
        held_tokens, read_tokens: what steps could have read of compressed caches, and what a selection let them read, summed over
            steps, layers and key heads; 0 without a selection. Of steps that calls share it is what all of them did.
        drafted_tokens, accepted_tokens, draft_rounds: tokens that were verified, those of them that became text, and in how many
            trees. draft_seconds: what proposing them took, which is part of `decode_seconds`.
        reached_by_depth, accepted_by_depth: of these trees, how many had a token at depth 1, 2, ... after what was accepted, and how
            many of them one that was accepted.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    shared_prompt_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    held_tokens: int = 0
    read_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_rounds: int = 0
    draft_seconds: float = 0.0
    reached_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def count_draft(self, tree: Tree, path: Sequence[int], accepted: int) -> None:
        """A tree was verified, of which `path` was accepted and its first `accepted` nodes became text: fewer where that ended."""
        self.draft_rounds += 1
        self.drafted_tokens += len(tree)
        self.accepted_tokens += accepted
        inner = set(tree.parents)
        for depth, node in enumerate([ROOT, *path]):
            if node not in inner or depth == accepted < len(path):
                return
            if depth == len(self.reached_by_depth):
                self.reached_by_depth.append(0)
                self.accepted_by_depth.append(0)
            self.reached_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < len(path)

    @property
    def acceptance_rate(self) -> float | None:
        """Of the tokens that the target looked at along accepted branches, those that it accepted; None where nothing was drafted."""
        reached = sum(self.reached_by_depth)
        return sum(self.accepted_by_depth) / reached if reached else None

    @property
    def mean_accepted(self) -> float | None:
        """Tokens of a draft that were accepted on average; None where nothing was drafted."""
        return self.accepted_tokens / self.draft_rounds if self.draft_rounds else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the drafts that had a token at depth 1, 2, ... and were accepted up to there, those of which it was accepted too."""
        pairs = zip(self.accepted_by_depth, self.reached_by_depth, strict=True)
        return [right / seen for right, seen in pairs]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first ones over `decode_seconds`; 0 when there were none."""
        return _rate(self.new_tokens - self.first_tokens, self.decode_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Speed of reading prompts, shared beginnings left out."""
        return _rate(self.prompt_tokens - self.shared_prompt_tokens, self.prefill_seconds)

    @property
    def read_share(self) -> float | None:
        """Of the tokens in the cache, those that steps read; None without a selection, or before the first step."""
        return self.read_tokens / self.held_tokens if self.held_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """What `stats` of a model gives, lists copied."""
        found = {name: getattr(self, name) for name in _REPORTED}
        return {name: list(value) if isinstance(value, list) else value for name, value in found.items()}


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
