"""Layouts of integer rows: token ids, token ids with images, or speech features with a transcript."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from compress.data import speech_rows
from runtime.modeling.skeleton import FEATURES


class TextRows:
    """Rows `[n, s]` of token ids, all of which the model reads.

    Attributes:
        name: keyword of the (first) stack's input.
    """

    name = "input_ids"

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        """Input of the (first) stack."""
        return rows

    def inputs(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model, without masks and targets."""
        return {self.name: self.source(rows)}

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        """What the decoder of an encoder-decoder reads, int64 `[n, t]`, beginning with the start token."""
        raise NotImplementedError("a model of one stack has no target")

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        """The tokens that all but the last of a row's logits predict; negative where a logit is not scored."""
        return rows[:, 1:]

    def shape(self, rows: torch.Tensor) -> tuple[Any, ...]:
        """A key that is equal for rows with equal block arguments, apart from the mask."""
        return tuple(rows.shape)

    def encoded(self, rows: torch.Tensor) -> int | None:
        """Output positions of the (first) stack for a row; None: known only after a run."""
        return int(self.source(rows).shape[1])

    def positions(self, rows: torch.Tensor) -> tuple[int, int]:
        """Number of rows, and the largest number of positions of one."""
        return len(rows), int(rows.shape[1])

    def length(self, rows: torch.Tensor) -> int:
        """Tokens of a row, as a user counts them."""
        return int(rows.shape[1])


class HalvedRows(TextRows):
    """Rows of token ids whose first half is the source of an encoder-decoder; its decoder reads the rest."""

    def __init__(self, start: int) -> None:
        self.start = start

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, : self._half(rows)]

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        return _begun(self.start, self.labels(rows))

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, self._half(rows) :]

    def _half(self, rows: torch.Tensor) -> int:
        return max(1, rows.shape[1] // 2)


class SpeechRows(TextRows):
    """Rows that hold the features of a sound and its transcript (`compress.data.speech_rows`).

    Args:
        start: the token that a decoder begins with. window: positions of the encoder at most; None: as many as features.
    """

    name = FEATURES

    def __init__(self, start: int, window: int | None) -> None:
        self.start, self._window = start, window

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        return speech_rows.features(rows)

    def target(self, rows: torch.Tensor) -> torch.Tensor:
        tokens = speech_rows.transcript(rows)
        # A decoder looks back only, so what stands behind the last token does not matter.
        return _begun(self.start, tokens.masked_fill(tokens == speech_rows.NOTHING, self.start))

    def labels(self, rows: torch.Tensor) -> torch.Tensor:
        return speech_rows.scored(rows)

    def shape(self, rows: torch.Tensor) -> tuple[Any, ...]:
        return (*rows.shape, *speech_rows.size(rows))

    def encoded(self, rows: torch.Tensor) -> int | None:
        return None

    def positions(self, rows: torch.Tensor) -> tuple[int, int]:
        frames = max(speech_rows.size(rows))
        return len(rows), min(frames, self._window or frames) + self.length(rows) + 1

    def length(self, rows: torch.Tensor) -> int:
        return int(speech_rows.transcript(rows).shape[1])


class ImageRows(TextRows):
    """Rows of token ids, some of which stand for images.

    In place of the processor's placeholder ids, a row holds a negative number (`-2` or less), a digest of its image features, so
    that rows can be batched, hashed and scored like text; `NOTHING` pads on the right. Image features are recomputed whenever the
    model reads them, because pixels take more memory than anything else here.

    Attributes:
        placeholder: id that stands for a piece of an image; None where the config names none, and no row has images.
    """

    def __init__(self, config: Any) -> None:
        names = ("image_token_id", "image_token_index")
        self.placeholder = next((id for name in names if isinstance(id := getattr(config, name, None), int)), None)
        self._features: dict[int, Callable[[], Mapping[str, torch.Tensor]]] = {}

    def pack(self, features: Callable[[], Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """A row, int64 `[n]`, for one text with its images.

        Args:
            features: computes the processor's tensors, whose first dimension counts texts or images; the same at every call.
        """
        assert self.placeholder is not None
        found = features()
        row = found["input_ids"][0].clone()
        sha256 = hashlib.sha256()
        for name in sorted(found):
            sha256.update(f"{name} {tuple(found[name].shape)} {found[name].dtype}".encode())
            sha256.update(found[name].contiguous().view(torch.uint8).numpy().tobytes())
        number = -2 - (int.from_bytes(sha256.digest()[:8], "big") >> 2)
        self._features[number] = features
        return row.masked_fill_(row.eq(self.placeholder), number)

    def inputs(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        numbers = [int(row.min()) for row in rows]
        found = [self._features[n]() if n < speech_rows.NOTHING else {} for n in numbers]
        length = rows.shape[1]
        given = {self.name: self.source(rows)}
        for name in dict.fromkeys(name for one in found for name in one):
            parts = [one[name] for one in found if name in one]
            if name in ("input_ids", "attention_mask"):
                continue
            if all(
                name not in one or one[name].shape[:2] == one["input_ids"].shape for one in found
            ):  # one for each token
                whole = parts[0].new_zeros(len(rows), length, *parts[0].shape[2:])
                for row, one in enumerate(found):
                    if name in one:
                        whole[row, : one[name].shape[1]] = one[name][0, :length]  # a row may have been cut
                given[name] = whole
            else:
                # Processors fill up images with zeros to the largest of a batch.
                sizes = [max(part.shape[i] for part in parts) for i in range(1, parts[0].ndim)]
                wide = [
                    pad(part, [n for i, size in reversed([*enumerate(sizes, 1)]) for n in (0, size - part.shape[i])])
                    for part in parts
                ]
                given[name] = torch.cat(wide)
        return given

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        filled = rows.masked_fill(rows == speech_rows.NOTHING, 0)  # a decoder looks back only, and masks leave them out
        return filled if self.placeholder is None else filled.masked_fill_(filled < 0, self.placeholder)

    def shape(self, rows: torch.Tensor) -> tuple[Any, ...]:
        # Positions depend on where images stand and on their shapes, masks of some families too.
        return (*rows.shape, rows.numpy().tobytes() if bool((rows < 0).any()) else None)


def _begun(start: int, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((len(tokens), 1), start, dtype=tokens.dtype), tokens], dim=1)
