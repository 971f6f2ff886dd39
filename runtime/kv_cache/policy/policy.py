"""Cache policies as recipes, `runtime.load`, artifacts and the command line say them: read, merged with a published method, checked."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import Any

from runtime.checkpoint.artifact import MANIFEST, Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.config.messages import plain, show
from runtime.config.settings import ConfigError, Path, Text, configure, is_off, mapping, read, settings_of, unknown
from runtime.errors import RequestError
from runtime.formats.quantization_config import static_prefix
from runtime.kv_cache.clusters import Clusters
from runtime.kv_cache.policy import checks
from runtime.kv_cache.policy import readers as parts
from runtime.kv_cache.policy.axes import Axes
from runtime.kv_cache.policy.calibrated import Calibrated
from runtime.kv_cache.policy.presets import PRESETS, Preset, find_preset

_log = logging.getLogger("compress.kv_cache")
WHERE = "kv_cache"
KEYS = (
    "method", "evict", "keys", "values", "recent", "prefix", "tiers", "saliency", "clusters", "select", "offload", "floats",
    "calibrated",
)  # fmt: skip


class Policy(Axes):
    """What a model's cache of keys and values does; see `Axes` for its keys."""

    @classmethod
    def parse(cls, value: Any, where: str = WHERE) -> Policy:
        """Read a policy: a mapping, or a published name.

        Args:
            value: as YAML or JSON gives it; a string may also be a JSON object, or the path of a .json file.
            where: what messages call it.

        Raises:
            ConfigError (a RequestError): an unknown key or name, a wrong value, an impossible combination.
        """
        try:
            policy = _read(value)
            checks.check_combination(policy)
            return policy
        except ConfigError as error:
            in_file = isinstance(value, str) and value.lower().endswith(".json") and FilePath(value).is_file()
            raise error.at(f"{value}: {where}" if in_file else where) from None

    def check_model(self, config: Any) -> None:
        """ConfigError where a model of this config has no cache that the policy could be for, or it was calibrated for another."""
        checks.check_model(self, config)

    def idle(self, config: Any) -> list[str]:
        """What of it does nothing to a model of this config, whose sequences are too short; sentences that begin with the key."""
        return checks.idle(self, config)


def choose_policy(
    value: str | Mapping[str, Any] | bool | None, artifact: Artifact, config: Callable[[], Any]
) -> Policy | None:
    """The policy for a model, checked against its config; None: an uncompressed cache.

    Args:
        value: what `runtime.load` was given as kv_cache.
        artifact: where a policy may be written, and what was calibrated for it.
        config: reads the model's config, if there is a policy.

    Raises:
        RequestError: the policy cannot be, or not for this model; the sentence says why.
    """
    policy = _find(value, artifact, config)
    tokens = () if policy is None else policy.prefix_tokens
    known = static_prefix(artifact.config.get("quantization_config"))
    if known is None or known == tokens:
        return policy
    behind = f"behind prefix tokens {list(known)}" if known else "without a prefix"
    here = str(list(tokens)) if tokens else "none"
    if value is None:
        way = "compress it again"
    elif known:
        way = "leave kv_cache out, or give it prefix: calibrated"
    else:
        way = "give prefix: 0, or compress it again with this policy as its kv_cache stage"
    text = f"the static activation scales of {artifact.path} were calibrated {behind}, and prompts would follow {here}; {way}"
    if known or value is not None:
        raise RequestError(f"{WHERE}.prefix: {text}")
    # An artifact of versions that calibrated all of them so: its prefix does no harm.
    _log.warning("%s.prefix: %s", WHERE, text)
    return policy


def _find(value: str | Mapping[str, Any] | bool | None, artifact: Artifact, config: Callable[[], Any]) -> Policy | None:
    """As `choose_policy`, whatever the grids of inputs."""
    if is_off(value):
        return None
    own = (artifact.manifest or {}).get(WHERE)
    if value is None and own is None:
        return None
    place = f"{artifact.path / MANIFEST}: {WHERE}"
    where = place if value is None else WHERE
    if value is True:
        raise RequestError("kv_cache must be a policy, None (the artifact's own) or False (none), not True")
    policy = Policy.parse(own if value is None else value, where)
    if policy.missing and policy.calibrated is None and own is not None:
        policy = policy.with_calibrated(Policy.parse(own, place).calibrated)
    try:
        policy.check_model(config())
        policy.check_complete()
    except ConfigError as error:
        raise error.at(where) from None
    return policy


# ---------------------------------------------------------------- reading
def _read(value: Any) -> Policy:
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, Mapping):
        expected = f"expected a mapping ({', '.join(KEYS)}) or a published name ({', '.join(PRESETS)})"
        raise ConfigError((), f"{expected}, got {show(value)}")
    given = mapping((), value, KEYS)
    method = given.pop("method", None)
    preset = None if method is None else _preset(read(Text, method, ("method",)), ("method",))
    settings = given if preset is None else _merged(preset, given)
    settings = {key: entry for key, entry in settings.items() if entry is not None}
    for key in ("keys", "values"):
        if key in settings and "tiers" in settings:
            raise ConfigError((key,), f"{key} and tiers both say how tokens are held; give one of them")
    readers: dict[str, Callable[[Any, Path], Any]] = {
        "evict": parts.read_eviction, "clusters": partial(configure, Clusters), "select": parts.read_selection,
        "offload": parts.read_offload, "calibrated": Calibrated.parse, "saliency": parts.read_score,
    }  # fmt: skip
    found: dict[str, Any] = {key: reader(settings[key], (key,)) for key, reader in readers.items() if key in settings}
    kinds = settings_of(Axes)
    for key in ("recent", "prefix", "floats"):
        if key in settings:
            found[key] = read(kinds[key].kind, settings[key], (key,))
    found["tiers"] = parts.read_tiers(settings)
    if len(found["tiers"]) > 1:
        found.setdefault("saliency", parts.read_score("snapkv", ("saliency",)))
    return Policy(None if preset is None else preset.name, **found)


def _from_text(value: str) -> Any:
    """A published name, a JSON object, or what a .json file holds."""
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError((), f"is no JSON object: {error}") from None
    if value.lower().endswith(".json"):
        file = FilePath(value)
        if not file.is_file():
            raise ConfigError((), f"there is no file {value}")
        return read_json(file)
    return {"method": _preset(value, ()).name}


def _preset(name: str, path: Path) -> Preset:
    preset = find_preset(name)
    if preset is None:
        raise unknown(path, name, PRESETS, "method")
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
