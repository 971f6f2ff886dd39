"""The target's first layers draft, with a small block of their own that was trained to go on from them to the target's head."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from runtime.checkpoint import read_json
from runtime.decoding.checks import is_integer
from runtime.decoding.drafters.base import Ask
from runtime.decoding.drafters.candidates import Candidates
from runtime.decoding.drafters.draft_model import DRAFT
from runtime.decoding.drafters.inside import GIVEN, Inside, Spot, engine_of, settings_of
from runtime.decoding.drafters.lanes import Lane, PagedLanes
from runtime.engines.base import Piece
from runtime.errors import ArtifactError, RequestError
from runtime.kv_cache.bounds import Range, bounded

if TYPE_CHECKING:
    from runtime.decoding.drafters.choose import Target
    from runtime.engines.llama_adapter import Adapter
    from runtime.engines.llama_view import View

ADAPTER = "adapter.safetensors"
SCHEMA_VERSION = 1
_FAR = 16  # tokens; a text that is further behind (its prompt) is read apart from the draft
_RECENT = 256  # tokens that are compared one by one


class AdapterLanes(PagedLanes):
    """What an adapter has read of texts. The layers before it read in the target's cache, and what they write there again of tokens that
    the target has read is what is there.

    Args:
        view: the layers before it. adapter: goes on from them.
    """

    def __init__(self, view: View, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.view, self.adapter = view, adapter

    def open(self) -> Spot:
        return Spot()

    def feed(self, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        spots = [cast(Spot, lane) for lane in lanes]
        found: list[torch.Tensor | None] = [None] * len(spots)
        waiting = [(index, list(each)) for index, each in enumerate(tokens)]
        while waiting:
            here, own, done, later, rows = [], [], [], [], self.most_rows
            for index, rest in waiting:
                spot, now, after = spots[index], rest[:rows], rest[rows:]
                if now:
                    start = len(spot.tokens)
                    self._reserve(spot, start + len(now))
                    here.append(Piece(now, start, spot.here.pages))
                    own.append(Piece(now, start, spot.pages))
                    done.append((index, not after))
                    spot.tokens += now
                    rows -= len(now)
                if after:
                    later.append((index, after))
            states = self.view.states(spots[0].here.pool, here)
            logits = self.adapter.read(self._memory, own, states)
            for row, (index, last) in enumerate(done):
                if last:
                    found[index] = logits[row]
            waiting = later
        return torch.stack([row for row in found if row is not None])

    def branch(self, lane: Lane, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def close(self, lane: Lane) -> None:
        super().close(lane)
        cast(Spot, lane).place = None


@dataclass(eq=False)
class Kangaroo(Inside):
    """A chain from the target's first layers and an adapter, which ends where it is not sure of a token.

    Source: Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting, arXiv 2404.18911.

    Attributes:
        confidence: the paper's eta: a chain ends at a token of less probability than this.
    """

    name: ClassVar[str] = "kangaroo"
    confidence: float = bounded(0.6, Range(0, 1, open_high=True))

    def start(self, asks: Sequence[Ask]) -> torch.Tensor:
        spots: list[Spot] = [ask.state for ask in asks]
        started = time.perf_counter()
        for spot, ask in zip(spots, asks, strict=True):
            self.lanes.cut(spot, common(spot.tokens, ask.text.tokens[:-1]))
            rest = ask.text.tokens[len(spot.tokens) : -1]
            if len(rest) > _FAR:
                self.lanes.feed([spot], [rest])
        self.overhead = time.perf_counter() - started
        return self.lanes.feed(
            spots, [ask.text.tokens[len(spot.tokens) :] for spot, ask in zip(spots, asks, strict=True)]
        )


def common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning. All but the end of it nearly always is, and is compared at once."""
    length = min(len(held), len(tokens))
    start = max(0, length - _RECENT)
    if held[:start] != tokens[:start]:
        start = 0
    return next((place for place in range(start, length) if held[place] != tokens[place]), length)


# ---------------------------------------------------------------- making one
def build(target: Target, settings: Mapping[str, Any]) -> Kangaroo:
    """The drafter of `{"model": directory}` whose draft.json says kangaroo.

    draft.json:
        schema_version  1
        method          "kangaroo"
        target          fingerprint of the checkpoint that it is a part of
        exit_layer      how many layers of it come before the adapter
    adapter.safetensors: see `runtime.engines.llama_adapter.Adapter`.

    Raises:
        RequestError: it is another target's, or the engine does not compute with parts of a model. ArtifactError: it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from runtime.engines.llama_adapter import Adapter
    from runtime.engines.llama_view import View

    path = Path(str(settings["model"]))
    engine = engine_of(target, Kangaroo.name)
    layer = _check(path, target, len(engine.parts.blocks))
    file = path / ADAPTER
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}") from error
    values = settings_of(Kangaroo, settings)
    adapter = Adapter(engine, tensors, layer, str(file))
    lanes = AdapterLanes(View(engine, range(layer)), adapter)
    return Kangaroo(lanes=lanes, candidates=Candidates(engine.vocab_size), weights=adapter.weight_bytes, **values)


def _check(path: Path, target: Target, layers: int) -> int:
    """The layer that an adapter goes on from."""
    file = path / DRAFT
    facts = read_json(file)
    if facts.get("method") != Kangaroo.name:
        raise ArtifactError(f"{file} is of a draft of method {facts.get('method')!r}, not of {Kangaroo.name!r}")
    version = facts.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArtifactError(f"{file} has schema_version {version!r}; this version reads {SCHEMA_VERSION}")
    own, fingerprint = facts.get("target"), target.artifact.checkpoint.fingerprint()
    if own != fingerprint:
        raise RequestError(
            f"drafter: {path} is a draft of another target: it was made for fingerprint {own}, and that of {target.artifact.path} is "
            f"{fingerprint}"
        )
    layer: Any = facts.get("exit_layer")
    if not is_integer(layer) or not 1 <= layer < layers:
        raise ArtifactError(
            f"{file}: exit_layer must be 1 to {layers - 1} of the model's {layers} layers, not {layer!r}"
        )
    return int(layer)


__all__ = ["ADAPTER", "GIVEN", "Kangaroo", "build"]
