"""Synthetic sequences that cannot be continued without looking far back: random keys in a passage, asked for at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from runtime.errors import RequestError

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
MOST_KEYS = len(_ORDINALS)


@dataclass(frozen=True)
class Passkeys:
    """Draws rows `start passage-with-(label key)s (label key)...`, the second time in random order; all rows are equally long.

    Attributes:
        stream: int64 `[n]`, text that passages are cut from.
        alphabet: int64 `[m]`, tokens that keys are drawn from.
        length: of a row.
        labels: what stands before each key; None: two random tokens, anew in every row.
        keys: how many.
        key_tokens: length of each.
        start: tokens that every row begins with.
    """

    stream: torch.Tensor
    alphabet: torch.Tensor
    length: int
    labels: tuple[tuple[int, ...], ...] | None
    keys: int
    key_tokens: int
    start: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: torch.Tensor, tokenizer: Any, length: int) -> Passkeys:
        """Rows of `length` tokens from calibration rows `[n, *]`; without a tokenizer (None) keys have random labels.

        Raises:
            RequestError: fewer than 16 different tokens in the rows.
        """
        special, labels, start = set(), None, ()
        if tokenizer is not None:
            special = set(tokenizer.all_special_ids)
            texts = [f"\nThe {name} key is: " for name in _ORDINALS]
            labels = tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
            begins = tokenizer("x")["input_ids"][:1]
            start = tuple(begins) if begins and begins[0] == tokenizer.bos_token_id else ()
        ids: torch.Tensor = cast(Any, torch).unique(rows)
        alphabet = ids[~torch.isin(ids, torch.tensor(sorted(special), dtype=torch.int64))]
        if len(alphabet) < 16:
            raise RequestError(f"calibration rows have {len(alphabet)} different tokens; gates need at least 16")
        key_tokens = min(32, max(2, length // 32))
        label = max(map(len, labels)) if labels else 2
        if labels and length < 4 * (key_tokens + label):
            labels, label = None, 2
        keys = min(MOST_KEYS, max(1, length // (4 * (key_tokens + label))))
        return cls(rows.reshape(-1), alphabet, length, labels, keys, key_tokens, start)

    def draw(self, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ids and bool `[batch, length]`; True: the next token is one of a key that is asked for."""
        drawn = [self._row(generator) for _ in range(batch)]
        return torch.stack([ids for ids, _ in drawn]), torch.stack([asked for _, asked in drawn])

    def _row(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [self._pair(number, generator) for number in range(self.keys)]
        again = [pairs[index] for index in torch.randperm(self.keys, generator=generator)]
        fill = self.length - len(self.start) - 2 * sum(len(label) + len(key) for label, key in pairs)
        stream = self.stream.repeat(-(-fill // len(self.stream)))
        begin = int(torch.randint(len(stream) - fill + 1, (), generator=generator))
        passage = stream[begin : begin + fill]
        cuts = torch.randint(fill + 1, (self.keys,), generator=generator).sort().values.tolist()
        parts = [torch.tensor(self.start, dtype=torch.int64)]
        for (label, key), low, high in zip(pairs, [0, *cuts], cuts, strict=False):
            parts += [passage[low:high], label, key]
        parts.append(passage[cuts[-1] :])
        asked = [torch.zeros(sum(map(len, parts)), dtype=torch.bool)]
        for label, key in again:
            parts += [label, key]
            asked += [torch.zeros(len(label), dtype=torch.bool), torch.ones(len(key), dtype=torch.bool)]
        return torch.cat(parts), torch.cat(asked).roll(-1)  # who sees a token predicts the next

    def _pair(self, number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        def some(count: int) -> torch.Tensor:
            return self.alphabet[torch.randint(len(self.alphabet), (count,), generator=generator)]

        label = some(2) if self.labels is None else torch.tensor(self.labels[number], dtype=torch.int64)
        return label, some(self.key_tokens)
