"""Kangaroo: the target's first layers draft, with a trained adapter from them to the target's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Interval

from runtime.config.settings import Probability
from runtime.drafting.config.target import Target, check_fingerprint
from runtime.drafting.draft_cache import DraftCache, Slot
from runtime.drafting.drafters.base import Place
from runtime.drafting.drafters.draft_model import DRAFT, read_fact, read_tensors
from runtime.drafting.drafters.model import Candidates
from runtime.drafting.drafters.sublayers import SublayerDrafter, engine_of
from runtime.engines.base import Chunk
from runtime.engines.native.sublayers import Adapter, View
from runtime.errors import ArtifactError

ADAPTER = "adapter.safetensors"
SCHEMA_VERSION = 1


class AdapterCache(DraftCache):
    """The cache of an adapter. The layers before it read in the target's cache; what they write there again of tokens that the target
    has read is what is there.

    Args:
        view: the layers before it. adapter: goes on from them.
    """

    def __init__(self, view: View, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.view, self.adapter = view, adapter
        self._places: dict[int, Place] = {}  # in the target's cache, by the adapter's pages

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        self._places = {id(slot.pages): slot.place for slot in slots}
        return super().feed(slots, tokens)

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
        places = [self._places[id(chunk.pages)] for chunk in chunks]
        there = [Chunk(chunk.tokens, chunk.start, place.pages) for chunk, place in zip(chunks, places, strict=True)]
        return (self.adapter.read(self._memory, chunks, self.view.states(places[0].pool, there)),)


@dataclass(eq=False)
class Kangaroo(SublayerDrafter):
    """A chain from the target's first layers and an adapter, which ends where it is not sure of a token.

    Source: Liu et al., Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting, arXiv 2404.18911.

    Attributes:
        confidence: the paper's eta: a chain ends at a token of less probability than this.
    """

    name: ClassVar[str] = "kangaroo"
    source: ClassVar[str] = "heads"
    confidence: Probability = 0.6

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> Kangaroo:
        """See `Drafter.build`.

        draft.json:
            schema_version  1
            method          "kangaroo"
            target          fingerprint of the checkpoint that it is a part of
            exit_layer      how many layers of it come before the adapter
        adapter.safetensors: see `runtime.engines.native.sublayers.Adapter`.
        """
        engine, version = engine_of(target, cls.name), facts.get("schema_version")
        if version != SCHEMA_VERSION:
            text = f"{directory / DRAFT} has schema_version {version!r}; this version reads {SCHEMA_VERSION}"
            raise ArtifactError(text)
        check_fingerprint(directory, facts, target.artifact)
        kind = Annotated[int, Interval(ge=1, lt=len(engine.parts.blocks))]
        layer: int = read_fact(directory, facts, kind, "exit_layer")
        adapter = Adapter(engine, read_tensors(directory / ADAPTER), layer, str(directory / ADAPTER))
        cache = AdapterCache(View(engine, range(layer)), adapter)
        candidates = Candidates(engine.vocab_size)
        return cls(cache=cache, candidates=candidates, weights=adapter.weight_bytes, **settings)
