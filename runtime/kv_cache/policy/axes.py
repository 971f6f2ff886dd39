"""Axes of a cache policy: which tokens stay, how they are stored, what a step reads, where they lie."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from runtime.config.settings import ConfigError, Natural, calibrations_of
from runtime.kv_cache.clusters import Clusters
from runtime.kv_cache.eviction import EvictionPlan
from runtime.kv_cache.offload import OffloadPlan
from runtime.kv_cache.plan import CachePlan
from runtime.kv_cache.policy.calibrated import Calibrated
from runtime.kv_cache.policy.presets import PRESETS
from runtime.kv_cache.policy.readers import write_eviction, write_method, write_tier
from runtime.kv_cache.policy.registries import PREFIX_TOKENS, SCORES, SELECTIONS
from runtime.kv_cache.scores.base import Score
from runtime.kv_cache.selection.base import Budget
from runtime.kv_cache.storage.plan import StoragePlan, Tier

RECENT = 128
CALIBRATED = "calibrated"
_Axes = TypeVar("_Axes", bound="Axes")


@dataclass(frozen=True)
class Axes:
    """Every axis is optional, and they combine; none of them: everything stays as it comes.

    Attributes:
        method: name of the published method that it began with, if any.
        evict: what leaves the cache; None: nothing.
        tiers: how older tokens are stored, one or several ways; empty: as floats. A recipe says `keys` and `values` where there is one.
        recent: newest tokens that stay floats where older ones do not.
        prefix: first tokens that stay floats and are never evicted; "calibrated": those that calibration puts before every prompt.
        saliency: score that orders tokens where there are several tiers.
        clusters: how similar tokens are merged.
        select: what a step reads; None: everything.
        offload: where older tokens lie; None: where attention computes.
        calibrated: what was found out about the model; None where nothing is needed, or not yet.
        floats: dtype of tokens that stay floats; None: the model's.
    """

    method: str | None = None
    evict: EvictionPlan | None = None
    tiers: tuple[Tier, ...] = ()
    recent: Natural = RECENT
    prefix: Natural | Literal["calibrated"] = 0
    saliency: Score | None = None
    clusters: Clusters | None = None
    select: Budget | None = None
    offload: OffloadPlan | None = None
    calibrated: Calibrated | None = None
    floats: Literal["float32", "float16", "bfloat16"] | None = None

    # ---------------------------------------------------------------- calibration
    @property
    def methods(self) -> dict[str, Any]:
        """The methods that may need calibration, by their key; not calibrated yet."""
        found = {"evict": None if self.evict is None else self.evict.score, "select": self.select}
        return {key: method for key, method in found.items() if method is not None}

    @property
    def needs(self) -> frozenset[str]:
        """Names of what calibration must find, such as gates, channels, prefix_tokens."""
        own = {PREFIX_TOKENS.name} if self.prefix == CALIBRATED else set()
        return frozenset(own).union(*(calibrations_of(type(method)) for method in self.methods.values()))

    @property
    def missing(self) -> frozenset[str]:
        """What of that has not been found."""
        return self.needs - (frozenset() if self.calibrated is None else self.calibrated.found)

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        """Token ids that are put before every prompt."""
        if self.prefix != CALIBRATED or self.calibrated is None:
            return ()
        return tuple(self.calibrated.values.get(PREFIX_TOKENS.name, ()))

    @property
    def first(self) -> int:
        """First tokens that stay floats, as far as the policy itself says how many they are."""
        return self.prefix if isinstance(self.prefix, int) else 0

    def with_calibrated(self: _Axes, calibrated: Calibrated | None) -> _Axes:
        """The same with what was found for it."""
        return dataclasses.replace(self, calibrated=calibrated)

    # ---------------------------------------------------------------- use
    def plan(self) -> CachePlan:
        """What `CompressedCache` takes.

        Raises:
            ConfigError: it needs calibration and has none.
        """
        self.check_complete()
        return self.draft()

    def draft(self) -> CachePlan:
        """As `plan`, whether calibrated or not: good for sizes."""
        eviction, selection = self.evict, self.select
        if eviction is not None:
            eviction = dataclasses.replace(eviction, score=self.with_facts(eviction.score))
        if selection is not None:
            selection = self.with_facts(selection)
        prefix = self.first or len(self.prefix_tokens)
        floats = None if self.floats is None else getattr(torch, self.floats)
        storage = StoragePlan(self.tiers, self.recent, prefix, self.saliency, self.clusters, floats)
        return CachePlan(eviction, storage, selection, self.offload)

    def with_facts(self, method: Any) -> Any:
        """A method with what calibration found for it; without, it is good for questions about its settings only."""
        known = {} if self.calibrated is None else self.calibrated.values
        facts = {name: known[name] for name in calibrations_of(type(method)) if name in known}
        return dataclasses.replace(method, **facts) if facts else method

    def check_complete(self) -> None:
        """ConfigError where something must be calibrated and has not been."""
        if self.missing:
            what = ", ".join(sorted(self.missing))
            name = self.method or "this policy"
            text = f"{name} needs {what}: calibrate it with `compress apply` (a recipe with this policy as its kv_cache stage)"
            raise ConfigError((), f"{text}, and load the artifact that it writes")

    # ---------------------------------------------------------------- written
    def resolved(self) -> dict[str, Any]:
        """As JSON, every default filled in; `Policy.parse` gives an equal policy."""
        tiers = [write_tier(tier) for tier in self.tiers]
        one = tiers[0] if len(tiers) == 1 else {}
        result = {
            "evict": None if self.evict is None else write_eviction(self.evict),
            "keys": one.get("keys"),
            "values": one.get("values"),
            "tiers": tiers if len(tiers) > 1 else None,
            "recent": self.recent,
            "prefix": self.prefix,
            "saliency": None if self.saliency is None else write_method(SCORES, self.saliency, "score"),
            "clusters": None if self.clusters is None else dataclasses.asdict(self.clusters),
            "select": None if self.select is None else write_method(SELECTIONS, self.select, "method", short=False),
            "offload": None if self.offload is None else self.offload.resolved(),
            "floats": self.floats,
            "calibrated": None if self.calibrated is None else self.calibrated.resolved(),
        }
        # What a preset would fill in and this policy does not have is said to be nothing.
        preset = {} if self.method is None else PRESETS[self.method].settings
        written = {key: entry for key, entry in result.items() if entry is not None or key in preset}
        return written if self.method is None else {"method": self.method, **written}

    def describe(self) -> str:
        """In a few words: "snapkv 25%, keys int4, values int4"."""
        words = []
        if self.evict is not None:
            evict = self.evict
            stays = f"{evict.tokens} tokens" if evict.ratio is None else f"{evict.ratio:.3g} of the tokens"
            shares = [f"({c.name})" for c in (evict.layers, evict.heads) if c.name not in ("uniform", "equal")]
            every = [] if evict.interval is None else [f"every {evict.interval} steps"]
            whole = ["beside the prompt"] if evict.keeps_prompt else []
            words.append(" ".join([evict.score.name, "to", stays, *whole, *shares, *every]))
        for tier in self.tiers:
            share = f"{tier.share:.3g} in " if len(self.tiers) > 1 else ""
            words.append(f"{share}keys {tier.keys.name}, values {tier.values.name}")
        if self.clusters is not None:
            words.append(f"clusters to {self.clusters.ratio:.3g}")
        if self.prefix:
            words.append(f"prefix {self.first or len(self.prefix_tokens)}")
        if self.select is not None:
            words.append(f"reads by {self.select.name}")
        if self.offload is not None:
            words.append(f"offload to {self.offload.to}")
        if self.floats is not None:
            words.append(f"floats in {self.floats}")
        return "; ".join(words) or "everything as it comes"
