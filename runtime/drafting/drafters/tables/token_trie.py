"""Trie of token n-grams with counts, and probabilities out of counts after longer and shorter contexts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

ROOT_NODE = 0
_NODE_BYTES = 256  # a dictionary of few children, the key and the number of an entry of it, weight and token
_LOOKED_AT = 16  # children, the latest that occurred, where the most frequent are wanted


class TokenTrie:
    """All n-grams of up to `depth` tokens of the sequences that were read, and how often each occurred.

    Nodes are numbers. Each has a dictionary of its children, the latest that occurred last: of numbers alone, so that no collection of
    garbage looks at it.

    Args:
        depth: most tokens of a branch.
        limit: most nodes. Beyond it, one first token after another, all that begins with it is halved, and what is left with less than
            one occurrence is dropped, so that branches that are not seen again go, and no step has to wait for the whole to be pruned.
    """

    def __init__(self, depth: int, limit: int) -> None:
        self.depth, self.limit = depth, max(limit, depth)
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.weight = array("f", [0.0])
        self.token = array("i", [-1])
        self._kids: list[dict[int, int]] = [{}]  # of each node, by token
        self._free: list[int] = []
        self._turn: list[int] = []  # first tokens that are to be pruned next
        self.prunings = getattr(self, "prunings", 0) + 1

    def __len__(self) -> int:
        """Nodes, without the root."""
        return len(self.weight) - 1 - len(self._free)

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of the trie, bytes."""
        return _NODE_BYTES * len(self.weight)

    # ---------------------------------------------------------------- reading
    def read(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Tokens that follow those which this reader brought before."""
        kids, weight = self._kids, self.weight
        for token in tokens:
            if reader.prunings != self.prunings:
                # What the reader holds may be other nodes by now.
                reader.ends, reader.prunings = [], self.prunings
            ends = []
            for node in (ROOT_NODE, *reader.ends[: self.depth - 1]):
                siblings = kids[node]
                kid = siblings.pop(token, None)
                if kid is None:
                    kid = self._new(token)
                else:
                    weight[kid] += 1.0
                siblings[token] = kid
                ends.append(kid)
            reader.ends = ends
            if len(self) > self.limit:
                self._prune()

    def _new(self, token: int) -> int:
        """A node that occurred once."""
        if self._free:
            node = self._free.pop()
            self.weight[node], self.token[node] = 1.0, token
            return node
        self.weight.append(1.0)
        self.token.append(token)
        self._kids.append({})
        return len(self.token) - 1

    # ---------------------------------------------------------------- asking
    def find(self, tokens: Sequence[int], node: int = ROOT_NODE) -> int | None:
        """The node of an n-gram, below another node."""
        for token in tokens:
            found = self._kids[node].get(token)
            if found is None:
                return None
            node = found
        return node

    def kids(self, node: int) -> Iterator[int]:
        """What occurred after an n-gram, the latest first."""
        return reversed(self._kids[node].values())

    def followers(self, node: int) -> list[tuple[int, float, int]]:
        """Of what occurred after an n-gram, the latest: token, weight, and node."""
        weight = self.weight
        return [(token, weight[kid], kid) for token, kid in islice(reversed(self._kids[node].items()), _LOOKED_AT)]

    # ---------------------------------------------------------------- pruning
    def _prune(self) -> None:
        self.prunings += 1
        while len(self) > self.limit:
            if not self._turn:
                self._turn = list(self.kids(ROOT_NODE))
            top = self._turn.pop()
            self._halve(top)
            if self.weight[top] < 1:
                self._drop(ROOT_NODE, top)

    def _halve(self, top: int) -> None:
        waiting = [top]
        while waiting:
            node = waiting.pop()
            self.weight[node] /= 2
            for kid in list(self.kids(node)):
                if self.weight[kid] < 2:
                    self._drop(node, kid)
                else:
                    waiting.append(kid)

    def _drop(self, node: int, top: int) -> None:
        """Take a child of a node away, with all that is under it."""
        del self._kids[node][self.token[top]]
        waiting = [top]
        while waiting:
            kid = waiting.pop()
            waiting += self.kids(kid)
            self._kids[kid] = {}
            self._free.append(kid)


@dataclass(slots=True)
class Reader:
    """The position of a sequence in a trie: the nodes of its last 1, 2, ... tokens. Each has its own, so that sequences may take turns."""

    ends: list[int] = field(default_factory=list)
    prunings: int = 0


After = TypeVar("After")


def blended(contexts: Iterable[Sequence[tuple[int, float, After]]], most: int) -> list[tuple[int, float, list[After]]]:
    """Tokens, their probabilities, and what each context has after them; the likeliest first.

    After a context that was followed n times, by t different tokens, one that came c times has c / (n + t), and what the next context
    says is weighted with the t / (n + t) that are left for others (Witten and Bell, The zero-frequency problem, IEEE Transactions on
    Information Theory 37(4), 1991, method C; with all counts blended, as in their interpolation).

    Args:
        contexts: from the one that is trusted most, of each the tokens that came after it, how often, and anything.
        most: tokens that are wanted.
    """
    chances: dict[int, float] = {}
    places: dict[int, list[After]] = {}
    left = 1.0
    for followers in contexts:
        if not followers:
            continue
        total = len(followers) + sum([count for _, count, _ in followers])
        share = left / total
        for token, count, after in followers:
            if token in chances:
                chances[token] += share * count
                places[token].append(after)
            else:
                chances[token] = share * count
                places[token] = [after]
        left *= len(followers) / total
    best = sorted(chances, key=chances.__getitem__, reverse=True)[:most]
    return [(token, chances[token], places[token]) for token in best]
