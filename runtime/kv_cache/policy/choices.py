"""Settings of a policy as written: methods with their fields, eviction, storage tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.config.fields import (
    Path,
    PolicyError,
    calibrated_fields,
    found,
    integer,
    mapping,
    number,
    options_of,
    read_fields,
    text,
    unknown,
)
from runtime.config.ranges import SHARE
from runtime.config.registry import CODECS, HEAD_SHARES, LAYER_SHARES, SCORES, Method, Table
from runtime.kv_cache.policy.calibrated import Calibrated
from runtime.kv_cache.policy.presets import find_preset
from runtime.kv_cache.storage.plan import Tier

RATIO = 0.25  # that a policy evicts to where it says neither ratio nor tokens
# Stand-ins for what has not been calibrated, of one layer and head.
_UNKNOWN: dict[str, Any] = {"gates": ((0.0,),), "channels": (((0,),),)}
_EVICT = ("score", "ratio", "tokens", "layers", "heads", "interval", "prompt")
_PROMPT = ("evict", "keep")


@dataclass(frozen=True)
class Choice:
    """A method of a table and its fields, all but those that calibration fills.

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
        """Fields that calibration must fill."""
        return frozenset(calibrated_fields(self.cls))

    def build(self, calibrated: Calibrated | None = None) -> Any:
        """The method itself; without its calibration it is good for questions about its fields only."""
        filled = {name: getattr(calibrated, name, None) or _UNKNOWN[name] for name in self.needs}
        given = {name: value.build() if isinstance(value, Choice) else value for name, value in self.fields.items()}
        return self.cls(**self.method.fixed, **filled, **given)

    def resolved(self, key: str, short: bool = True) -> Any:
        """As it is written: the name alone where all fields are defaults, else a mapping with the name under `key`."""
        written = {name: _plain(value) for name, value in self.fields.items()}
        return self.name if short and not written else {key: self.name, **written}

    @classmethod
    def parse(
        cls,
        table: Table,
        value: Any,
        path: Path,
        key: str,
        defaults: Mapping[str, Any] | None = None,
        beside: Iterable[str] = (),
    ) -> Choice:
        """A name, or a mapping with the name under `key` and fields beside it.

        Args:
            table: what may stand there.
            path: of the value.
            key: of the name in the mapping.
            defaults: of fields, where they are not the dataclass's.
            beside: other keys of the mapping, for messages; they are read elsewhere.
        """
        fields: dict[str, Any] = {}
        where = path
        if isinstance(value, Mapping):
            fields = {str(name): part for name, part in value.items()}
            if key not in fields:
                raise PolicyError(path, f"the key '{key}' is missing; it is one of {', '.join(table.names)}")
            value, where = fields.pop(key), (*path, key)
        if not isinstance(value, str):
            raise PolicyError(
                where, f"expected the name of a {table.what} ({', '.join(table.names)}), got {found(value)}"
            )
        method = table.find(value)
        if method is None:
            preset = find_preset(value)
            if preset is not None:
                raise PolicyError(where, f"'{value}' is a whole method: write `method: {preset.name}` beside this key")
            raise unknown(where, value, table.names, table.what)
        dataclass_ = method.load()
        if defaults:
            known = options_of(dataclass_, method.fixed)
            fields = {name: default for name, default in defaults.items() if name in known} | fields
        read = read_fields(dataclass_, fields, path, method.fixed, _score, beside)
        made = cls(method, read)
        try:
            made.build()
        except ValueError as error:
            raise PolicyError(path, str(error)) from error
        return made


def _plain(value: Any) -> Any:
    """A field's value as JSON."""
    if isinstance(value, Choice):
        return value.resolved("score")
    return list(value) if isinstance(value, tuple) else value


def _score(path: Path, value: Any) -> Choice:
    inner = Choice.parse(SCORES, value, path, "score")
    if inner.needs:
        raise PolicyError(path, f"{inner.name} cannot stand inside another score")
    return inner


@dataclass(frozen=True)
class Evict:
    """What is evicted; see `runtime.kv_cache.eviction.EvictionPlan`. `prompt` is "keep" where `EvictionPlan.keeps_prompt`."""

    score: Choice
    layers: Choice
    heads: Choice
    ratio: float | None = RATIO
    tokens: int | None = None
    interval: int | None = None
    prompt: str = "evict"

    @classmethod
    def parse(cls, value: Any, path: Path) -> Evict:
        given = dict(value) if isinstance(value, Mapping) else {"score": value}
        own = {key: given.pop(key) for key in _EVICT if key in given}
        score = {"score": own["score"]} if "score" in own else {}
        chosen = Choice.parse(SCORES, {**score, **given}, path, "score", beside=_EVICT)
        ratio, tokens = own.get("ratio"), own.get("tokens")
        if ratio is not None and tokens is not None:
            raise PolicyError((*path, "tokens"), "ratio and tokens both say what is kept; give one of them")
        if tokens is None:
            ratio = RATIO if ratio is None else number((*path, "ratio"), ratio, SHARE)
        else:
            tokens = integer((*path, "tokens"), tokens, 1)
        interval = own.get("interval")
        prompt = "evict" if own.get("prompt") is None else text((*path, "prompt"), own["prompt"])
        if prompt not in _PROMPT:
            raise unknown((*path, "prompt"), prompt, _PROMPT, "way with prompts")
        return cls(
            chosen,
            Choice.parse(LAYER_SHARES, own.get("layers") or "uniform", (*path, "layers"), "share"),
            Choice.parse(HEAD_SHARES, own.get("heads") or "equal", (*path, "heads"), "share"),
            ratio,
            tokens,
            None if interval is None else integer((*path, "interval"), interval, 1),
            prompt,
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
            raise PolicyError(path, "expected a list of tiers, such as {keys: int4, values: int4, share: 0.4}")
        tiers = []
        for place, entry in enumerate(value):
            here = (*path, place)
            given = mapping(here, entry, ("keys", "values", "share"), "a tier")
            share = given.get("share", 1.0 if len(value) == 1 else None)
            if share is None:
                raise PolicyError(here, "the key 'share' is missing; the shares of all tiers add up to 1")
            tiers.append(cls.parse(given, here, number((*here, "share"), share, SHARE)))
        total = sum(tier.share for tier in tiers)
        if abs(total - 1) > 1e-6:
            raise PolicyError(path, f"the shares of the tiers add up to {total:g}, not to 1")
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
            raise PolicyError((*path, "group"), "group is for grids a token (axis: token)")
        return codec
    return codec if given else Choice(codec.method, {**codec.fields, "group": 32})
