"""Cache policies that pages of the engine with CUDA graphs can hold, and the reason why transformers' modules run the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.engines.llama_structure import Program
from runtime.engines.page_storage import why_not_pages
from runtime.kv_cache.pages import PAGE as BLOCK
from runtime.kv_cache.storage.base import Codec
from runtime.kv_cache.storage.integer import Integer
from runtime.kv_cache.storage.plain import Plain

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy

MOST_ROWS = 2048
"""Tokens of prompts that one step takes."""
MOST_SIZE = 256
"""Channels of a head, at most."""


@dataclass(frozen=True)
class Storage:
    """How the pages of a pool are stored.

    Attributes:
        keys, values: codecs of pages that are no longer recent.
        prefix: first tokens of a sequence that stay plain.
        recent: newest tokens that a query sees plain; a page is stored when all its tokens are older.
    """

    keys: Codec
    values: Codec
    prefix: int
    recent: int

    def __str__(self) -> str:
        return f"keys {self.keys.name}, values {self.values.name}"

    def first(self, page: int) -> int:
        """Pages of a sequence that stay plain: all that hold a token which does."""
        return -(-self.prefix // page)

    def recent_pages(self, page: int) -> int:
        """Of a sequence, those that can be plain at once, beside what a step writes."""
        return self.first(page) + -(-self.recent // page) + 2

    def layers(self, program: Program) -> list[int]:
        """Numbers of those whose older pages do not stay plain: queries of the others see a window only."""
        return [number for number, block in enumerate(program.blocks) if not block.window]

    def plain_bytes(self, program: Program, page: int) -> int:
        """Of a plain page of the layers that are stored, together."""
        return len(self.layers(program)) * _plain_bytes(program, page)

    def least_places(self, page: int) -> int:
        """Of plain pages: those of a step, and of one sequence."""
        return MOST_ROWS // page + self.recent_pages(page)

    def places(self, program: Program, page: int, count: int) -> int:
        """Of plain pages, that a pool of so many pages has from the start: an eighth of their memory. It takes more when it must."""
        shared = count * self.page_bytes(program, page) // (8 * self.plain_bytes(program, page))
        return min(count, max(self.least_places(page), shared))

    def page_bytes(self, program: Program, page: int) -> int:
        """Of a page of all layers together, without the plain ones of those that are stored."""
        stored = len(self.layers(program))
        bytes_ = (len(program.blocks) - stored) * _plain_bytes(program, page)
        for codec in (self.keys, self.values):
            for part in codec.parts(program.head_dim, program.dtype).values():
                count = part.width * (1 if part.per_page else BLOCK) * part.dtype.itemsize
                bytes_ += stored * program.kv_heads * page // BLOCK * count
        return bytes_


def _plain_bytes(program: Program, page: int) -> int:
    """Of a page of one layer, keys and values."""
    return 2 * page * program.kv_heads * program.head_dim * program.dtype.itemsize


def why_modules_store(policy: Policy) -> str | None:
    """What a policy says to do that pages of this engine cannot, whatever the model; None: they can."""
    for what, given in (
        ("evict tokens", policy.evict),
        ("select what a step reads", policy.select),
        ("offload pages", policy.offload),
        ("hold floats in another dtype", policy.floats),
        ("begin with calibrated tokens", None if isinstance(policy.prefix, int) else policy.prefix),
    ):
        if given is not None:
            return what
    return why_not_pages(policy)


def storage_of(policy: Policy, program: Program, page: int) -> Storage | str:
    """A policy's, for a model and pages of so many positions; or the reason why transformers' modules run it."""
    reason = why_modules_store(policy)
    if reason is not None:
        return f"the cache's policy says to {reason}"
    plan = policy.plan().storage
    tier = plan.tiers[0] if plan.tiers else None
    keys, values = (Plain(), Plain()) if tier is None else (tier.keys, tier.values)
    found = Storage(keys, values, plan.prefix, plan.recent)
    if found.keys.name == found.values.name == "plain":
        return "the cache's policy stores nothing in fewer bits"
    if not found.layers(program):
        return "the cache's policy stores what is no longer recent, and queries of all layers see a window only"
    if program.head_dim > MOST_SIZE:
        return f"its heads have {program.head_dim} channels, and pages are stored for heads of up to {MOST_SIZE}"
    group = values.group if isinstance(values, Integer) and values.groups(program.head_dim) > 1 else 0
    if group and (group & (group - 1) or program.head_dim % group):
        return f"the cache's policy has groups of {group} channels, no power of two that divides heads of {program.head_dim}"
    if page % BLOCK:
        return f"pages of {page} positions are not whole blocks of {BLOCK}"
    return found
