"""Trie of token n-grams with counts, and probabilities out of counts after longer and shorter contexts."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

ROOT_NODE = 0
_NONE = 0  # the root is nobody's child and nobody's sibling
_ENTRY_BYTES = 64  # the key and the number that an entry of the dictionary points to
_LOOKED_AT = 16  # children, the latest that occurred, where the most frequent are wanted


class TokenTrie:
    """All n-grams of up to `depth` tokens of the sequences that were read, and how often each occurred.

    Nodes are numbers, what is known of them is in arrays, and children are found in one dictionary: a million small objects would
    make every collection of garbage slow. Children of a node are also a list, the latest that occurred first.

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
        self._kids: dict[int, int] = {}  # node and token: node
        self.weight = array("f", [0.0])
        self.token = array("i", [-1])
        self._first = array("i", [_NONE])
        self._next = array("i", [_NONE])
        self._previous = array("i", [_NONE])
        self._free: list[int] = []
        self._turn: list[int] = []  # first tokens that are to be pruned next
        self.prunings = getattr(self, "prunings", 0) + 1

    def __len__(self) -> int:
        """Nodes, without the root."""
        return len(self._kids)

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of the trie, bytes."""
        parts = (self.weight, self.token, self._first, self._next, self._previous, self._free, self._kids)
        return sum(map(sys.getsizeof, parts)) + _ENTRY_BYTES * len(self)

    # ---------------------------------------------------------------- reading
    def read(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Tokens that follow those which this reader brought before."""
        kids, weight, first = self._kids, self.weight, self._first
        for token in tokens:
            if reader.prunings != self.prunings:
                # What the reader holds may be other nodes by now.
                reader.ends, reader.prunings = [], self.prunings
            ends = []
            for node in (ROOT_NODE, *reader.ends[: self.depth - 1]):
                kid = kids.get(node << 32 | token)
                if kid is None:
                    kid = self._add(node, token)
                else:
                    weight[kid] += 1.0
                    if first[node] != kid:
                        self._unlink(node, kid)
                        self._link(node, kid)
                ends.append(kid)
            reader.ends = ends
            if len(kids) > self.limit:
                self._prune()

    def _add(self, node: int, token: int) -> int:
        if self._free:
            kid = self._free.pop()
            self.weight[kid], self.token[kid], self._first[kid] = 1.0, token, _NONE
        else:
            kid = len(self.weight)
            self.weight.append(1.0)
            self.token.append(token)
            for links in (self._first, self._next, self._previous):
                links.append(_NONE)
        self._kids[node << 32 | token] = kid
        self._link(node, kid)
        return kid

    def _link(self, node: int, kid: int) -> None:
        """As the first of the node's children."""
        after = self._first[node]
        self._next[kid], self._previous[kid], self._first[node] = after, _NONE, kid
        if after:
            self._previous[after] = kid

    def _unlink(self, node: int, kid: int) -> None:
        before, after = self._previous[kid], self._next[kid]
        if before:
            self._next[before] = after
        else:
            self._first[node] = after
        if after:
            self._previous[after] = before

    # ---------------------------------------------------------------- asking
    def find(self, tokens: Sequence[int], node: int = ROOT_NODE) -> int | None:
        """The node of an n-gram, below another node."""
        for token in tokens:
            found = self._kids.get(node << 32 | token)
            if found is None:
                return None
            node = found
        return node

    def kids(self, node: int) -> Iterator[int]:
        """What occurred after an n-gram, the latest first."""
        kid = self._first[node]
        while kid:
            yield kid
            kid = self._next[kid]

    def followers(self, node: int) -> list[tuple[int, float, int]]:
        """Of what occurred after an n-gram, the latest: token, weight, and node."""
        found: list[tuple[int, float, int]] = []
        kid, tokens, weight, following = self._first[node], self.token, self.weight, self._next
        while kid and len(found) < _LOOKED_AT:
            found.append((tokens[kid], weight[kid], kid))
            kid = following[kid]
        return found

    # ---------------------------------------------------------------- pruning
    def _prune(self) -> None:
        self.prunings += 1
        while len(self._kids) > self.limit:
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
        self._unlink(node, top)
        waiting = [(node, top)]
        while waiting:
            above, kid = waiting.pop()
            waiting += [(kid, below) for below in self.kids(kid)]
            del self._kids[above << 32 | self.token[kid]]
            self._free.append(kid)


class Reader:
    """The position of a sequence in a trie: the nodes of its last 1, 2, ... tokens. Each has its own, so that sequences may take turns."""

    __slots__ = ("ends", "prunings")

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.prunings = 0


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
