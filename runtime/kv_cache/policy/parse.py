"""The parts of a policy as they are written: a method's name with its fields, what is evicted, tiers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from runtime.config.fields import (
    Path,
    PolicyError,
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
from runtime.config.registry import SCORES, SELECTIONS, plain
from runtime.kv_cache.clusters import Clusters
from runtime.kv_cache.offload import OffloadPlan
from runtime.kv_cache.policy.calibrated import Calibrated
from runtime.kv_cache.policy.checks import check_combination
from runtime.kv_cache.policy.choices import Choice, Evict, TierChoice
from runtime.kv_cache.policy.policy import RECENT, Policy
from runtime.kv_cache.policy.presets import PRESETS, Preset, find_preset

# Policies from what a user wrote, and back: published names are filled in, keys are checked, combinations too.

KEYS = (
    "method", "evict", "keys", "values", "recent", "prefix", "tiers", "saliency", "clusters", "select", "offload", "floats",
    "calibrated",
)  # fmt: skip
READ = 0.1  # of the tokens, what a selection reads that says neither ratio nor tokens
_CALIBRATED = "calibrated"
_PLACES = ("host", "disk")
_FLOATS = ("float32", "float16", "bfloat16")


def read(value: Any) -> Policy:
    """The policy of a mapping or a text; see `Policy.parse`."""
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, Mapping):
        raise PolicyError(
            (), f"expected a mapping ({', '.join(KEYS)}) or a published name ({', '.join(PRESETS)}), got {found(value)}"
        )
    given = mapping((), value, KEYS)
    preset = _preset(given.pop("method", None))
    settings = given if preset is None else _merged(preset, given)
    for key in ("keys", "values"):
        if settings.get(key) is not None and settings.get("tiers") is not None:
            raise PolicyError((key,), f"{key} and tiers both say how tokens are held; give one of them")

    def part(key: str, make: Any, absent: Any = None) -> Any:
        return absent if settings.get(key) is None else make(settings[key], (key,))

    policy = Policy(
        None if preset is None else preset.name,
        part("evict", Evict.parse),
        _tiers(settings),
        part("recent", lambda entry, path: integer(path, entry), RECENT),
        part("prefix", _prefix, 0),
        part("saliency", lambda entry, path: Choice.parse(SCORES, entry, path, "score")),
        part("clusters", _clusters),
        part("select", _select),
        part("offload", _offload),
        part("calibrated", Calibrated.parse),
        part("floats", _floats),
    )
    if policy.saliency is None and len(policy.tiers) > 1:
        policy = dataclasses.replace(policy, saliency=Choice.parse(SCORES, "snapkv", ("saliency",), "score"))
    check_combination(policy)
    return policy


def write(policy: Policy) -> dict[str, Any]:
    """Plain JSON that `read` makes an equal policy of."""
    result: dict[str, Any] = {
        "evict": None if policy.evict is None else policy.evict.resolved(),
        "keys": None,
        "values": None,
        "tiers": None,
        "recent": policy.recent,
        "prefix": policy.prefix,
        "saliency": None if policy.saliency is None else policy.saliency.resolved("score"),
        "clusters": None if policy.clusters is None else dataclasses.asdict(policy.clusters),
        "select": None if policy.select is None else policy.select.resolved("method", short=False),
        "offload": None if policy.offload is None else dataclasses.asdict(policy.offload),
        "floats": policy.floats,
        "calibrated": None if policy.calibrated is None else policy.calibrated.resolved(),
    }
    if len(policy.tiers) == 1:
        tier = policy.tiers[0].resolved()
        result |= {"keys": tier["keys"], "values": tier["values"]}
    elif policy.tiers:
        result["tiers"] = [tier.resolved() for tier in policy.tiers]
    if result["offload"] is not None and result["offload"]["directory"] is None:
        result["offload"] = policy.offload.to if policy.offload is not None else None
    # What a preset would fill in and this policy does not have is said to be nothing.
    preset = {} if policy.method is None else PRESETS[policy.method].settings
    written = {key: entry for key, entry in result.items() if entry is not None or key in preset}
    return written if policy.method is None else {"method": policy.method, **written}


def _floats(value: Any, path: Path) -> str:
    name = text(path, value)
    if name not in _FLOATS:
        raise unknown(path, name, _FLOATS, "dtype")
    return name


# ---------------------------------------------------------------- names and presets
def _from_text(value: str) -> Any:
    """A published name, a JSON object, or what a .json file holds."""
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise PolicyError((), f"is no JSON object: {error}") from None
    if value.lower().endswith(".json"):
        from runtime.checkpoint.checkpoint import read_json

        file = FilePath(value)
        if not file.is_file():
            raise PolicyError((), f"there is no file {value}")
        return read_json(file)
    preset = find_preset(value)
    if preset is None:
        raise unknown((), value, PRESETS, "method")
    return {"method": preset.name}


def _preset(name: Any) -> Preset | None:
    if name is None:
        return None
    preset = find_preset(text(("method",), name))
    if preset is None:
        raise unknown(("method",), name, PRESETS, "method")
    return preset


def _merged(preset: Preset, given: dict[str, Any]) -> dict[str, Any]:
    """The preset's keys, overridden: mappings key by key as long as they are about the same method."""
    settings = dict(preset.settings)
    if given.get("keys") is not None or given.get("values") is not None:
        settings = {key: entry for key, entry in settings.items() if key not in ("tiers", "saliency")}
    if given.get("tiers") is not None:
        settings = {key: entry for key, entry in settings.items() if key not in ("keys", "values")}
    for key, name in (("evict", "score"), ("select", "method"), ("clusters", "")):
        entry, base = given.get(key), settings.get(key)
        base = {name: base} if isinstance(base, str) else base
        if isinstance(entry, Mapping) and isinstance(base, Mapping) and _alike(entry.get(name), base.get(name)):
            if entry.get("tokens") is not None or entry.get("ratio") is not None:
                base = {other: part for other, part in base.items() if other not in ("tokens", "ratio")}
            given = {**given, key: {**base, **entry}}
    return settings | given


def _alike(name: Any, base: Any) -> bool:
    return name is None or (isinstance(name, str) and isinstance(base, str) and plain(name) == plain(base))


# ---------------------------------------------------------------- keys
def _tiers(settings: Mapping[str, Any]) -> tuple[TierChoice, ...]:
    if settings.get("tiers") is not None:
        tiers = TierChoice.parse_all(settings["tiers"], ("tiers",))
    else:
        tiers = (TierChoice.parse(settings, ()),)
    return () if all(tier.is_plain for tier in tiers) else tiers


def _prefix(value: Any, path: Path) -> int | str:
    if isinstance(value, str):
        if value != _CALIBRATED:
            raise PolicyError(path, f"expected a number of tokens, or '{_CALIBRATED}', got {found(value)}")
        return value
    return integer(path, value)


def _no_score(path: Path, value: Any) -> Any:
    raise PolicyError(path, "no score can stand here")


def _clusters(value: Any, path: Path) -> Clusters:
    given = mapping(path, value, options_of(Clusters))
    fields = read_fields(Clusters, given, path, (), _no_score)
    try:
        return Clusters(**fields)
    except ValueError as error:
        raise PolicyError(path, str(error).removeprefix("clusters.")) from error


def _select(value: Any, path: Path) -> Choice:
    given = dict(value) if isinstance(value, Mapping) else {"method": value}
    budget = [key for key in ("tokens", "ratio") if given.get(key) is not None]
    if len(budget) == 2:
        raise PolicyError((*path, "tokens"), "ratio and tokens both say how much is read; give one of them")
    if not budget:
        given["ratio"] = READ
    elif budget == ["tokens"]:
        given["tokens"] = integer((*path, "tokens"), given["tokens"], 1)
    else:
        given["ratio"] = number((*path, "ratio"), given["ratio"], SHARE)
    return Choice.parse(SELECTIONS, given, path, "method")


def _offload(value: Any, path: Path) -> OffloadPlan:
    given = mapping(
        path, {"to": value} if isinstance(value, str) else value, ("to", "directory"), "host, disk or a mapping"
    )
    to, directory = given.get("to"), given.get("directory")
    if to not in _PLACES:
        raise unknown((*path, "to"), to, _PLACES, "place")
    if directory is not None and to != "disk":
        raise PolicyError((*path, "directory"), "a directory is for offload to disk")
    return OffloadPlan(to, None if directory is None else text((*path, "directory"), directory))
