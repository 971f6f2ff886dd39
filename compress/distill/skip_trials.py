"""How far parts of a model draft what the whole model writes: drafts from places in texts, counted as speculative decoding would."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compress.distill.rows import check_rows
from runtime.engines.base import Piece
from runtime.engines.llama import LlamaEngine
from runtime.engines.llama_view import View
from runtime.errors import RequestError


class DraftTrials:
    """Places in texts from which parts of a model draft, and what the whole model writes there.

    A draft begins where the model's own keys and values end, as it does when texts are written, so what is counted is what speculative
    decoding would accept.

    Args:
        engine: of the model.
        ids: int64 `[n, s]`, texts.
        places: in each, evenly spread over its second half or, where they are too many for it, over all of it.
        tokens: of a draft.

    Attributes:
        written: int64 `[n * places, tokens]`, what the model writes, greedily.
    """

    def __init__(self, engine: LlamaEngine, ids: torch.Tensor, places: int, tokens: int) -> None:
        ids = check_rows(ids, "texts to draft after", 2)
        length = int(ids.shape[1])
        if not 1 <= places < length or tokens < 1:
            raise RequestError(f"drafts after rows of {length} tokens: 1 to {length - 1} places, not {places}")
        self.engine, self.tokens, self._size = engine, tokens, engine.page_size
        first = max(1, min(length // 2, length - places))
        starts = sorted({first + (length - first) * index // places - 1 for index in range(places)})
        shared = -(-length // self._size)
        own = max(-(-(start + tokens) // self._size) - start // self._size for start in starts)
        self._pool = engine.new_pages(len(ids) * (shared + own * len(starts)))
        self._last: list[int] = []
        self._pieces: list[tuple[int, list[int]]] = []
        page = 0
        for row in ids.tolist():
            pages = list(range(page, page + shared))
            page += shared
            for begin in range(0, length, engine.most_rows):
                engine.read(self._pool, [Piece(row[begin : begin + engine.most_rows], begin, pages)])
            for start in starts:
                mine = list(range(page, page + own))
                page += own
                full = start // self._size
                for tensor in self._pool.tensors:
                    tensor[mine[0]] = tensor[pages[full]]
                self._pieces.append((start, pages[:full] + mine))
                self._last.append(row[start])
        self.written = self._write()

    def __len__(self) -> int:
        return len(self._last)

    def accepted(self, view: View) -> torch.Tensor:
        """How many tokens of each place's draft by a view the model writes itself, before the first that it does not; int64 `[places]`."""
        counts = torch.zeros(len(self), dtype=torch.int64)
        alive = list(range(len(self)))
        for step in range(self.tokens):
            following = []
            for group in self._groups(alive):
                found = view.read(self._pool, self._step(group, step)).argmax(-1)
                right = found == self.written[group, step]
                following += [index for index, each in zip(group, right.tolist(), strict=True) if each]
            counts[following] += 1
            alive = following
        return counts

    def rates(self, view: View) -> list[float]:
        """For each token of a draft, the share of the places that accept it among those that accepted all before it; as far as there are
        any."""
        counts, result = self.accepted(view), []
        for depth in range(self.tokens):
            reached = int((counts >= depth).sum())
            if not reached:
                break
            result.append(float((counts > depth).sum()) / reached)
        return result

    def _write(self) -> torch.Tensor:
        """What the whole model writes, token by token; its keys and values stay in the places' own pages until a draft overwrites them."""
        self.written = torch.zeros(len(self), self.tokens, dtype=torch.int64)
        for step in range(self.tokens):
            for group in self._groups(range(len(self))):
                self.written[group, step] = self.engine.read(self._pool, self._step(group, step)).argmax(-1)
        return self.written

    def _groups(self, indices: Sequence[int]) -> list[list[int]]:
        size = self.engine.most_rows
        return [list(indices[begin : begin + size]) for begin in range(0, len(indices), size)]

    def _step(self, group: Sequence[int], step: int) -> list[Piece]:
        """The token before the one that is looked for: all of a draft that was accepted so far is what the model wrote."""
        pieces = []
        for index in group:
            start, pages = self._pieces[index]
            token = self._last[index] if step == 0 else int(self.written[index, step - 1])
            pieces.append(Piece([token], start + step, pages))
        return pieces
