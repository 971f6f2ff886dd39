"""Parts of a policy as they are written: a method's name with its settings, what is evicted, tiers of storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.config.messages import show
from runtime.config.registry import Method, Registry
from runtime.config.settings import (
    ConfigError,
    Count,
    Path,
    Share,
    calibrations_of,
    mapping,
    read,
    read_settings,
    settings_of,
    unknown,
)
from runtime.kv_cache.policy.calibrated import Calibrated
from runtime.kv_cache.policy.presets import find_preset
from runtime.kv_cache.policy.registries import CODECS, HEAD_BUDGETS, LAYER_BUDGETS, SCORES
from runtime.kv_cache.storage.plan import Tier

RATIO = 0.25  # that a policy evicts to where it says neither ratio nor tokens


@dataclass(frozen=True)
class Choice:
    """A method of a registry and its settings, all but those that calibration finds.

    Attributes:
        method: which.
        fields: {name: value}, defaults filled in.
    """

    method: Method
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def cls(self) -> Any:
        """Its dataclass."""
        return self.method.load()

    @property
    def needs(self) -> frozenset[str]:
        """Fields that calibration must find."""
        return frozenset(calibrations_of(self.cls))

    def build(self, calibrated: Calibrated | None = None) -> Any:
        """The method itself; without its calibration it is good for questions about its settings only."""
        known = {} if calibrated is None else {name: calibrated.values[name] for name in self.needs & calibrated.found}
        given = {name: value.build() if isinstance(value, Choice) else value for name, value in self.fields.items()}
        return self.cls(**self.method.fixed, **known, **given)

    def resolved(self, key: str, short: bool = True) -> Any:
        """As it is written: the name alone where there is no setting, else a mapping with the name under `key`."""
        written = {name: _plain(value) for name, value in self.fields.items()}
        return self.name if short and not written else {key: self.name, **written}

    @classmethod
    def parse(
        cls,
        registry: Registry,
        value: Any,
        path: Path,
        key: str,
        defaults: Mapping[str, Any] | None = None,
        beside: Iterable[str] = (),
    ) -> Choice:
        """A name, or a mapping with the name under `key` and settings beside it.

        Args:
            registry: what may stand there.
            path: of the value.
            key: of the name in the mapping.
            defaults: of settings, where they are not the dataclass's.
            beside: other keys of the mapping, for messages; they are read elsewhere.
        """
        fields: dict[str, Any] = {}
        where = path
        if isinstance(value, Mapping):
            fields = {str(name): part for name, part in value.items()}
            if key not in fields:
                raise ConfigError(path, f"the key '{key}' is missing; it is one of {', '.join(registry.names)}")
            value, where = fields.pop(key), (*path, key)
        if not isinstance(value, str):
            text = f"expected the name of a {registry.what} ({', '.join(registry.names)}), got {show(value)}"
            raise ConfigError(where, text)
        method = registry.find(value)
        if method is None:
            preset = find_preset(value)
            if preset is not None:
                raise ConfigError(where, f"'{value}' is a whole method: write `method: {preset.name}` beside this key")
            raise unknown(where, value, registry.names, registry.what)
        known = settings_of(method.load(), method.fixed)
        fields = {name: default for name, default in (defaults or {}).items() if name in known} | fields
        made = cls(method, read_settings(method.load(), fields, path, method.fixed, beside, _score))
        try:
            made.build()
        except ValueError as error:
            raise ConfigError(path, str(error)) from error
        return made


def _plain(value: Any) -> Any:
    """A setting as JSON."""
    if isinstance(value, Choice):
        return value.resolved("score")
    return list(value) if isinstance(value, tuple) else value


def _score(path: Path, value: Any) -> Choice:
    inner = Choice.parse(SCORES, value, path, "score")
    if inner.needs:
        raise ConfigError(path, f"{inner.name} cannot stand inside another score")
    return inner


@dataclass(frozen=True)
class Evict:
    """What is evicted; see `runtime.kv_cache.eviction.EvictionPlan`. `prompt` is "keep" where `EvictionPlan.keeps_prompt`."""

    score: Choice
    layers: Choice
    heads: Choice
    ratio: Share | None = RATIO
    tokens: Count | None = None
    interval: Count | None = None
    prompt: Literal["evict", "keep"] = "evict"

    @classmethod
    def parse(cls, value: Any, path: Path) -> Evict:
        given = dict(value) if isinstance(value, Mapping) else {"score": value}
        kinds = {name: setting.kind for name, setting in settings_of(cls).items()}
        own = {key: given.pop(key) for key in kinds if key in given}
        score = {"score": own["score"]} if "score" in own else {}
        chosen = Choice.parse(SCORES, {**score, **given}, path, "score", beside=kinds)
        own = {key: entry for key, entry in own.items() if entry is not None}
        if "ratio" in own and "tokens" in own:
            raise ConfigError((*path, "tokens"), "ratio and tokens both say how much stays; give one of them")
        if "tokens" in own:
            own["ratio"] = None
        return cls(
            chosen,
            Choice.parse(LAYER_BUDGETS, own.get("layers", "uniform"), (*path, "layers"), "share"),
            Choice.parse(HEAD_BUDGETS, own.get("heads", "equal"), (*path, "heads"), "share"),
            **{
                key: read(kinds[key], own[key], (*path, key))
                for key in ("ratio", "tokens", "interval", "prompt")
                if key in own
            },
        )

    def resolved(self) -> dict[str, Any]:
        budget = {"ratio": self.ratio} if self.tokens is None else {"tokens": self.tokens}
        shares = {"layers": self.layers.resolved("share"), "heads": self.heads.resolved("share")}
        when = {"interval": self.interval, "prompt": self.prompt}
        return {**self.score.resolved("score", short=False), **budget, **shares, **when}


@dataclass(frozen=True)
class TierChoice:
    """One way to hold older tokens; see `runtime.kv_cache.storage.plan.Tier`."""

    keys: Choice
    values: Choice
    share: float = 1.0

    @property
    def is_plain(self) -> bool:
        return self.keys.name == self.values.name == "plain"

    def build(self) -> Tier:
        return Tier(self.keys.build(), self.values.build(), self.share)

    @classmethod
    def parse(cls, given: Mapping[str, Any], path: Path, share: float = 1.0) -> TierChoice:
        codecs = []
        for key, defaults in (("keys", {"axis": "channel"}), ("values", {"axis": "token"})):
            value = given.get(key)
            codec = Choice.parse(CODECS, "plain" if value is None else value, (*path, key), "codec", defaults)
            codecs.append(_grouped(codec, value, (*path, key)))
        return cls(codecs[0], codecs[1], share)

    @classmethod
    def parse_all(cls, value: Any, path: Path) -> tuple[TierChoice, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise ConfigError(path, "expected a list of tiers, such as {keys: int4, values: int4, share: 0.4}")
        tiers = []
        for place, entry in enumerate(value):
            here = (*path, place)
            given = mapping(here, entry, ("keys", "values", "share"), "a tier")
            share = given.get("share", 1.0 if len(value) == 1 else None)
            if share is None:
                raise ConfigError(here, "the key 'share' is missing; the shares of all tiers add up to 1")
            tiers.append(cls.parse(given, here, read(Share, share, (*here, "share"))))
        total = sum(tier.share for tier in tiers)
        if abs(total - 1) > 1e-6:
            raise ConfigError(path, f"the shares of the tiers add up to {total:g}, not to 1")
        return tuple(tiers)

    def resolved(self) -> dict[str, Any]:
        return {"keys": self.keys.resolved("codec"), "values": self.values.resolved("codec"), "share": self.share}


def _grouped(codec: Choice, value: Any, path: Path) -> Choice:
    """Integers on grids a token share them among 32 channels unless a policy says otherwise; on grids a channel nothing is shared."""
    if "group" not in codec.fields:
        return codec
    given = isinstance(value, Mapping) and "group" in value
    if codec.fields["axis"] == "channel":
        if given and value["group"]:
            raise ConfigError((*path, "group"), "group is for grids a token (axis: token)")
        return codec
    return codec if given else Choice(codec.method, {**codec.fields, "group": 32})
