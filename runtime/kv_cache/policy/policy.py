"""A policy: what a model's cache of keys and values does, as recipes, `runtime.load`, artifacts and the command line say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.checkpoint.artifact import MANIFEST, Artifact
from runtime.config.fields import PolicyError
from runtime.errors import RequestError
from runtime.kv_cache.policy.calibrated import Calibrated, fingerprint
from runtime.kv_cache.policy.choices import Choice, Evict, TierChoice

if TYPE_CHECKING:
    from runtime.kv_cache.clusters import Clusters
    from runtime.kv_cache.offload import OffloadPlan
    from runtime.kv_cache.plan import CachePlan


# Which policy a model is loaded with: the caller's, the artifact's own, or none.

_OFF = ("none", "off")


def is_off(value: Any) -> bool:
    """Whether `kv_cache` asks for a plain cache: False, "none", "off"."""
    return value is False or (isinstance(value, str) and value.lower() in _OFF)


def choose_policy(value: str | Mapping[str, Any] | bool | None, artifact: Artifact, config: Any) -> Policy | None:
    """The policy for a model of `config`, checked against it; None: a plain cache.

    Args:
        value: what `runtime.load` was given as kv_cache.
        artifact: where a policy may be written, and what was calibrated for it.

    Raises:
        RequestError: the policy cannot be, or not for this model; the sentence says why.
    """
    if is_off(value):
        return None
    written = (artifact.manifest or {}).get("kv_cache")
    if value is None and written is None:
        return None
    from runtime.config.fields import PolicyError

    place = f"{artifact.path / MANIFEST}: kv_cache"
    own = value is None
    where = place if own else "kv_cache"
    if value is True:
        raise RequestError("kv_cache must be a policy, None (the artifact's own) or False (none), not True")
    policy = Policy.parse(written if own else value, where)
    if policy.missing and policy.calibrated is None and written is not None:
        found = Policy.parse(written, place).calibrated
        if found is not None:
            policy = policy.with_calibrated(found)
    try:
        policy.check_model(config)
        policy.check_complete()
    except PolicyError as error:
        raise error.at(where) from None
    return policy


__all__ = ["Calibrated", "Policy", "PolicyError", "fingerprint"]

RECENT = 128


@dataclass(frozen=True)
class Policy:
    """Which tokens stay (evict), how they are held (keys, values, tiers, clusters), what a step reads (select), where they lie
    (offload). Every key is optional, axes combine; a policy of none of them keeps everything as it comes.

    Attributes:
        method: name of the published method that it began with, if any.
        evict: what leaves the cache; None: nothing.
        tiers: how older tokens are held, one or several ways; empty: as floats. A recipe says `keys` and `values` where there is one.
        recent: newest tokens that stay floats where older ones do not.
        prefix: first tokens that stay floats and are never evicted; "calibrated": those that calibration puts before every prompt.
        saliency: score that orders tokens where there are several tiers.
        clusters: how similar tokens are merged.
        select: what a step reads; None: everything.
        offload: where older tokens lie; None: where attention computes.
        calibrated: what was found out about the model; None where nothing is needed, or not yet.
        floats: dtype that tokens that stay floats are held in; None: the model's.
    """

    method: str | None = None
    evict: Evict | None = None
    tiers: tuple[TierChoice, ...] = ()
    recent: int = RECENT
    prefix: int | str = 0
    saliency: Choice | None = None
    clusters: Clusters | None = None
    select: Choice | None = None
    offload: OffloadPlan | None = None
    calibrated: Calibrated | None = None
    floats: str | None = None

    @classmethod
    def parse(cls, value: Any, where: str = "kv_cache") -> Policy:
        """Read a policy: a mapping, or a published name.

        Args:
            value: as YAML or JSON gives it; of texts also a JSON object, or the path of a .json file.
            where: what messages call it.

        Raises:
            PolicyError (a RequestError): an unknown key or name, a wrong value, an impossible combination.
        """
        from runtime.kv_cache.policy.parse import read

        try:
            return read(value)
        except PolicyError as error:
            in_file = isinstance(value, str) and value.lower().endswith(".json") and Path(value).is_file()
            raise error.at(f"{value}: {where}" if in_file else where) from None

    # ---------------------------------------------------------------- calibration
    @property
    def needs(self) -> frozenset[str]:
        """What calibration must find: some of gates, channels, prefix_tokens."""
        found = frozenset() if self.evict is None else self.evict.score.needs
        found |= frozenset() if self.select is None else self.select.needs
        return found | (frozenset(["prefix_tokens"]) if self.prefix == "calibrated" else frozenset())

    @property
    def missing(self) -> frozenset[str]:
        """What of that has not been found."""
        return self.needs - (frozenset() if self.calibrated is None else self.calibrated.found)

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        """Token ids that are put before every prompt."""
        if self.prefix != "calibrated" or self.calibrated is None:
            return ()
        return self.calibrated.prefix_tokens or ()

    def with_calibrated(self, calibrated: Calibrated | None) -> Policy:
        """The same with what was found for it."""
        return replace(self, calibrated=calibrated)

    # ---------------------------------------------------------------- use
    def plan(self) -> CachePlan:
        """What `CompressedCache` takes.

        Raises:
            PolicyError: it needs calibration and has none.
        """
        self.check_complete()
        return self.draft()

    def draft(self) -> CachePlan:
        """As `plan`, whether calibrated or not: good for sizes."""
        import torch

        from runtime.kv_cache.eviction import EvictionPlan
        from runtime.kv_cache.plan import CachePlan
        from runtime.kv_cache.storage.plan import StoragePlan

        known = self.calibrated
        eviction = None
        if self.evict is not None:
            plan = self.evict
            eviction = EvictionPlan(
                plan.score.build(known),
                plan.layers.build(),
                plan.heads.build(),
                plan.ratio,
                plan.tokens,
                plan.interval,
                plan.prompt == "keep",
            )
        storage = StoragePlan(
            tuple(tier.build() for tier in self.tiers),
            self.recent,
            self.prefix if isinstance(self.prefix, int) else len(self.prefix_tokens),
            None if self.saliency is None else self.saliency.build(),
            self.clusters,
            None if self.floats is None else getattr(torch, self.floats),
        )
        return CachePlan(eviction, storage, None if self.select is None else self.select.build(known), self.offload)

    def check_complete(self) -> None:
        """PolicyError where something must be calibrated and has not been."""
        if self.missing:
            what = ", ".join(sorted(self.missing))
            name = self.method or "this policy"
            text = f"{name} needs {what}: calibrate it with `compress apply` (a recipe with this policy as its kv_cache stage)"
            raise PolicyError((), f"{text}, and load the artifact that it writes")

    def check_model(self, config: Any) -> None:
        """PolicyError where a model of this config has no cache that the policy could be for, or it was calibrated for another."""
        from runtime.kv_cache.policy.checks import check_policy

        check_policy(self, config)

    def idle(self, config: Any) -> list[str]:
        """What of it can do nothing to a model of this config, whose texts are too short; sentences that begin with the key."""
        from runtime.kv_cache.policy.checks import idle

        limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        return [] if not isinstance(limit, int) else idle(self, limit)

    def resolved(self) -> dict[str, Any]:
        """As JSON, every default filled in; `parse` gives an equal policy."""
        from runtime.kv_cache.policy.parse import write

        return write(self)

    def describe(self) -> str:
        """In a few words: "snapkv 25%, keys int4, values int4"."""
        words = []
        if self.evict is not None:
            kept = (
                f"{self.evict.tokens} tokens" if self.evict.ratio is None else f"{self.evict.ratio:.3g} of the tokens"
            )
            shares = [c.name for c in (self.evict.layers, self.evict.heads) if c.name not in ("uniform", "equal")]
            every = [] if self.evict.interval is None else [f"every {self.evict.interval} steps"]
            whole = ["beside the prompt"] if self.evict.prompt == "keep" else []
            words.append(
                " ".join([self.evict.score.name, "to", kept, *whole, *(f"({share})" for share in shares), *every])
            )
        for tier in self.tiers:
            share = f"{tier.share:.3g} in " if len(self.tiers) > 1 else ""
            words.append(f"{share}keys {tier.keys.name}, values {tier.values.name}")
        if self.clusters is not None:
            words.append(f"clusters to {self.clusters.ratio:.3g}")
        if self.prefix:
            count = len(self.prefix_tokens) if self.prefix == "calibrated" else self.prefix
            words.append(f"prefix {count}")
        if self.select is not None:
            words.append(f"reads by {self.select.name}")
        if self.offload is not None:
            words.append(f"offload to {self.offload.to}")
        if self.floats is not None:
            words.append(f"floats in {self.floats}")
        return "; ".join(words) or "everything as it comes"
