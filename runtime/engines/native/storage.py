"""Cache policies inside the native engine: what of a policy its pages can be, or the reason why transformers' modules run it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runtime.config.settings import ConfigError
from runtime.engines.native.parts import Parts
from runtime.engines.native.selection import why_modules_select
from runtime.engines.page_storage import LANES, why_not_pages
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import KINDS, PAGE, Cache, Storage
from runtime.kernels.cpu.decoder import OPS, Block
from runtime.kv_cache.offload import DiskOffload
from runtime.kv_cache.pages import PAGE as HALF
from runtime.kv_cache.scores.base import Accumulating
from runtime.kv_cache.selection.quest import Quest
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

if TYPE_CHECKING:
    from runtime.kv_cache.eviction import EvictionPlan
    from runtime.kv_cache.policy.policy import Policy

NEAR = 2  # layers whose pages are in memory while a step reads those of an offloaded cache


@dataclass(frozen=True)
class PageStorage:
    """How the pages of a pool are stored.

    Attributes:
        keys, values: codecs of pages that are no longer recent.
        first: pages of a sequence that stay plain: all that hold a token which does.
        recent: newest tokens that a query sees plain; a page is stored when all its tokens are older.
        floats: dtype of plain pages; None: the model's.
        select: what tokens that follow a prompt read; None: all.
        directory: of a file that pages lie in that are no longer recent; None: they are in memory.
    """

    keys: Codec
    values: Codec
    first: int
    recent: int
    floats: torch.dtype | None = None
    select: Quest | None = None
    directory: Path | None = None

    def __str__(self) -> str:
        reads = "" if self.select is None else f", reads by {self.select.name}"
        return f"keys {self.keys.name}, values {self.values.name}{reads}{'' if self.directory is None else ', on disk'}"

    @property
    def group(self) -> int:
        """Channels of a value on one grid; 0: all."""
        return self.values.group if isinstance(self.values, Integer) else 0

    def structure(self, dtype: torch.dtype) -> Storage:
        """In C, without the places of plain pages; `dtype` is that of plain pages."""
        kinds = [KINDS.get(codec.name, library.TYPES[dtype]) for codec in (self.keys, self.values)]
        return Storage(key_kind=kinds[0], value_kind=kinds[1], group=self.group, first=self.first, recent=self.recent)

    @property
    def is_plain(self) -> bool:
        """Whether all pages stay plain, and in memory."""
        return self.keys.name == self.values.name == "plain" and self.directory is None

    @property
    def recent_pages(self) -> int:
        """Of a sequence, those that can be plain at once, beside what a step writes."""
        return self.first + -(-self.recent // PAGE) + 2

    def stored_layers(self, layers: Sequence[Block]) -> list[int]:
        """Numbers of those whose older pages do not stay plain."""
        return [] if self.is_plain else whole_layers(layers)

    def selecting_layers(self, layers: Sequence[Block]) -> list[int]:
        """Numbers of those whose queries read a part of the cache."""
        return [] if self.select is None else whole_layers(layers)[self.select.skip_layers :]

    def plain_bytes(self, parts: Parts, layers: Sequence[Block]) -> int:
        """Of a plain page of the layers that are stored otherwise, together."""
        return len(self.stored_layers(layers)) * parts.page_numbers * self._dtype(parts).itemsize

    def page_bytes(self, parts: Parts) -> int:
        """In memory, of a page of all layers together, without the plain ones of those that are stored."""
        stored = len(self.stored_layers(parts.blocks))
        plain = (len(parts.blocks) - stored) * parts.page_numbers * self._dtype(parts).itemsize
        if self.directory is not None:
            stored = min(stored, NEAR)
        bounds = PAGE // HALF * 2 * parts.kv_heads * parts.head_dim * self._dtype(parts).itemsize
        return (
            stored * parts.kv_heads * self.record_bytes(parts)
            + plain
            + len(self.selecting_layers(parts.blocks)) * bounds
        )

    def _dtype(self, parts: Parts) -> torch.dtype:
        return self.floats or parts.cache_dtype

    def record_bytes(self, parts: Parts) -> int:
        """Of a page, of one head of one layer."""
        found = library.load()
        assert found is not None
        dtype = self._dtype(parts)
        sizes = parts.kv_heads, parts.head_dim, parts.value_dim
        cache = Cache(None, None, None, library.TYPES[dtype], *sizes, self.structure(dtype))
        return int(found.cache_record(ctypes.byref(cache)))


def windows(blocks: Sequence[Block]) -> list[int]:
    """Of each layer, positions that its queries see; 0: all."""
    found = [[op.attend for op in block.ops[: block.count] if OPS[op.kind] == "attend"] for block in blocks]
    return [max((each.window for each in attends), default=0) for attends in found]


def whole_layers(blocks: Sequence[Block]) -> list[int]:
    """Layers whose queries see all positions; the policy leaves the cache of the others as it is."""
    return [number for number, window in enumerate(windows(blocks)) if not window]


def why_modules_store(policy: Policy) -> str | None:
    """What a policy says to do that the native engine's pages cannot, whatever the model; None: they can."""
    if policy.offload is not None and policy.offload.to == "host":
        return "offload pages to the host"
    if policy.select is not None and (reason := why_modules_select(policy.select)) is not None:
        return reason
    if policy.evict is not None and (reason := _why_modules_evict(policy.evict)) is not None:
        return reason
    return why_not_pages(policy)


def _why_modules_evict(rule: EvictionPlan) -> str | None:
    """As `why_modules_store`, of what is evicted."""
    if "hidden" in rule.score.wants:
        return f"evict tokens by {rule.score.name}, which sees the inputs of attention modules"
    if isinstance(rule.score, Accumulating) and not rule.layers.sums_only:  # whose queries are not remembered
        return f"evict tokens by {rule.score.name}, of layers that share the budget as {rule.layers.name} says"
    return None


def _has_sinks(blocks: Sequence[Block]) -> bool:
    return any(OPS[op.kind] == "attend" and op.attend.sinks for block in blocks for op in block.ops[: block.count])


def storage_of(policy: Policy, parts: Parts) -> PageStorage | str:
    """A policy's, for a model; or the reason why transformers' modules run it.

    Raises:
        ConfigError: the directory of what is offloaded cannot be written.
    """
    reason = why_modules_store(policy)
    if reason is not None:
        return f"the cache's policy says to {reason}"
    rule, whole = policy.evict, whole_layers(parts.blocks)
    if rule is not None and not whole:
        return "the cache's policy says to evict tokens, and queries of all layers see a window only"
    if rule is not None and not rule.sums_only and _has_sinks(parts.blocks):
        return "the cache's policy says to evict tokens by attention without sinks, which the model has"
    if rule is not None and (not rule.is_even or rule.keeps_prompt or len(whole) < len(parts.blocks)):
        # What stays lies in blocks of its own, which neither bounds of pages nor a file of them follow.
        for what, given in (("select what a step reads", policy.select), ("offload pages to a disk", policy.offload)):
            if given is not None:
                return f"the cache's policy says to {what} where layers and heads keep different numbers of tokens"
    plan = policy.plan().storage
    tier = plan.tiers[0] if plan.tiers else None
    keys, values = (Plain(), Plain()) if tier is None else (tier.keys, tier.values)
    select = policy.select if isinstance(policy.select, Quest) else None
    directory = None
    if policy.offload is not None:
        try:
            offload = policy.offload.begin(torch.device("cpu"))
        except ValueError as error:
            raise ConfigError((), str(error), "kv_cache") from error
        assert isinstance(offload, DiskOffload)
        directory = offload.directory
    found = PageStorage(keys, values, -(-plan.prefix // PAGE), plan.recent, plan.floats, select, directory)
    if not found.is_plain and (parts.head_dim % LANES or parts.value_dim % LANES):
        return f"its heads are of {parts.head_dim} channels, no multiple of {LANES}"
    return found
