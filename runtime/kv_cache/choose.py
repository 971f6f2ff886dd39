"""Which policy a model is loaded with: the caller's, the artifact's own, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.artifact import MANIFEST, Artifact
from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.kv_cache.policy import Policy

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
    from runtime.kv_cache.policy import Policy
    from runtime.kv_cache.policy_fields import PolicyError

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
