"""The scheme that a recipe's fields mean: a preset, which other fields override."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError

from compress.quantize.config import CANDIDATES, QuantizeConfig
from compress.quantize.transforms import METHODS as TRANSFORMS
from runtime.config.messages import did_you_mean
from runtime.errors import RequestError
from runtime.formats.checks import why_not_inputs
from runtime.formats.grid import GridScheme
from runtime.formats.k_quant import KQuant
from runtime.formats.presets import PRESETS, preset
from runtime.formats.representation import Representation
from runtime.formats.scheme import ActivationScheme, Scheme, representation_of

_GRID_FIELDS = ("bits", "group_size", "symmetric")
_OF_ACTIVATIONS = ("activations", "activation_mode", "int8_channels")
_OF_GRIDS = ("scales", "static_groups", "refit_scales")  # options of methods that apply to grids only


def _check_options(config: QuantizeConfig, scheme: Scheme) -> Scheme:
    """A scheme other than a plain grid; RequestError where the recipe sets options that mean nothing to it."""
    weights = scheme.weights
    if weights is None or isinstance(weights, GridScheme):
        return scheme
    if weights.lossless:
        return _check_lossless(config, scheme, weights)
    fields = type(config).model_fields
    for key in _OF_GRIDS:
        if key in fields and getattr(config, key) != fields[key].default:
            raise RequestError(
                f"{key} applies to grids only, and {weights.describe()} fits its own scales: leave {key} out"
            )
    return scheme


def _check_lossless(config: QuantizeConfig, scheme: Scheme, weights: Representation) -> Scheme:
    """The scheme; RequestError where the recipe has weights changed or rounded."""
    name = f"scheme '{config.scheme}'" if isinstance(config.scheme, str) else f"scheme {weights.describe()}"
    for key, only in (("method", "rtn"), ("objective", "layer"), ("scales", "mse")):
        if (given := getattr(config, key)) != only:
            given = f"{given} (quality best)" if key == "objective" and config.quality == "best" else given
            raise RequestError(
                f"{name} stores weights without loss and rounds nothing: {key} must be {only}, not {given}"
            )
    if scheme.activations is not None:
        raise RequestError(f"{name} is weight-only: leave activations and activation_mode out")
    if scheme.sparsity is not None:
        raise RequestError(f"{name} stores dense weights, and an earlier stage prunes them: leave one of the two out")
    return scheme


def _with_transform(config: QuantizeConfig, scheme: Scheme) -> Scheme:
    """The scheme with the input transform that a recipe asks for; RequestError where it is unknown, or does not go with the rest."""
    name, weights = config.input_transform, scheme.weights
    if scheme.activations is not None and scheme.activations.int8_tail:
        if name not in (None, "outliers_last"):
            raise RequestError(
                f"input_transform {name}: int8_channels orders the inputs itself: leave one of the two out"
            )
        name = "outliers_last"
    if name is None or weights is None:
        return scheme
    if name not in TRANSFORMS:
        raise RequestError(
            f"input_transform '{name}' is unknown: {', '.join(TRANSFORMS)}{did_you_mean(name, list(TRANSFORMS))}"
        )
    method, block_size, reason = TRANSFORMS[name], None, None
    if weights.lossless:
        reason = f"{weights.describe()} stores weights without loss"
    elif scheme.sparsity is not None:
        reason = "pruned weights are zero in the basis that their inputs come in only: leave the stage that prunes out"
    elif config.budget is not None:
        reason = "a budget measures layers in the basis that their inputs come in: give whole bits"
    if method.by_group:
        block_size = weights.group_size
        reason = reason or (
            None if block_size else f"it rotates groups of columns, and {weights.describe()} has none: give hadamard"
        )
    if reason is not None:
        raise RequestError(f"input_transform {name}: {reason}")
    return replace(scheme, transform=method.kind(name, block_size))


def resolve_scheme(config: QuantizeConfig | None, sparsity: str | None = None) -> Scheme:
    """The scheme that a recipe's fields mean.

    Args:
        config: quantization fields; None keeps float values. Of a budget the candidate of most bits is meant.
        sparsity: pattern as `runtime.formats.scheme.Scheme.sparsity` spells it.

    Raises:
        RequestError: unknown preset or fields that contradict each other.
    """
    if config is None:
        return Scheme(sparsity=sparsity)
    return _with_transform(config, _scheme_of(config, sparsity))


def _scheme_of(config: QuantizeConfig, sparsity: str | None) -> Scheme:
    """`resolve_scheme` without an input transform."""
    if config.budget is not None:
        return candidate_schemes(config, sparsity)[-1]
    if isinstance(config.scheme, dict):
        represented = _represented(config, config.scheme)
        if isinstance(represented, KQuant):
            return _scheme_of(config.model_copy(update={"scheme": represented.kind}), sparsity)
        return _check_options(config, Scheme(represented, _activations(config, None, None), sparsity))
    scheme = preset(config.scheme) if config.scheme is not None else PRESETS["W4A16"]
    weights = scheme.grid
    if weights is None:
        for key in _GRID_FIELDS:
            if getattr(config, key) is not None:
                raise RequestError(f"scheme '{config.scheme}' has a fixed {key}: leave it out")
        if any(getattr(config, key) is not None for key in _OF_ACTIVATIONS):
            what = "is weight-only" if scheme.activations is None else "has fixed activations"
            raise RequestError(f"scheme '{config.scheme}' {what}: leave {', '.join(_OF_ACTIVATIONS)} out")
        if config.scales == "positive" and isinstance(scheme.weights, KQuant):
            raise RequestError(f"scheme '{config.scheme}' has scales of both signs: scales must not be positive")
        return _check_options(config, replace(scheme, sparsity=sparsity))
    if config.bits is not None:
        assert isinstance(config.bits, int)
        if weights.type == "float" and config.bits != 8:
            raise RequestError(f"scheme '{config.scheme}' stores weights as fp8: bits must be 8, not {config.bits}")
        weights = replace(weights, bits=config.bits)
    if config.group_size is not None:
        weights = _with_group(weights, config.group_size)
    if config.symmetric is not None:
        if weights.type == "float" and not config.symmetric:
            raise RequestError(
                f"scheme '{config.scheme}' stores weights as fp8, which has no zero point: symmetric must be true"
            )
        weights = replace(weights, symmetric=config.symmetric)
    return Scheme(weights, _activations(config, scheme.activations, weights), sparsity)


def candidate_schemes(config: QuantizeConfig, sparsity: str | None = None) -> tuple[Scheme, ...]:
    """The schemes among which a budget chooses, by ascending bits of a code; none without one.

    Raises:
        RequestError: a candidate that is no scheme, or two that quantize activations differently.
    """
    if config.budget is None:
        return ()
    found = list[Scheme]()
    for candidate in config.candidates or CANDIDATES:
        changes = _changes(candidate)
        given = preset(changes["scheme"]) if isinstance(changes.get("scheme"), str) else None
        if given is not None and given.grid is None:  # fields of grids mean nothing to it
            changes = {**dict.fromkeys(_GRID_FIELDS), **changes}
        bare = {"bits": None, "size": None, "max_kl": None, "candidates": None}
        try:
            found.append(resolve_scheme(config.model_copy(update={**bare, **changes}), sparsity))
        except RequestError as error:
            raise RequestError(f"candidates: {candidate}: {error}") from None
    unknown = next((scheme.weights for scheme in found if scheme.weights is not None and scheme.weights.counted), None)
    if unknown is not None:
        raise RequestError(
            f"candidates: the size of {unknown.describe()} depends on the weights, and a budget must know it before"
        )
    if len({scheme.activations for scheme in found}) > 1:
        raise RequestError("candidates: all must quantize activations alike, or none")
    if len(set(found)) < len(found):
        twice = next(scheme for scheme in found if found.count(scheme) > 1)
        assert twice.weights is not None
        raise RequestError(f"candidates: {twice.weights.describe()} is there twice")
    return tuple(sorted(found, key=_fineness))


def _fineness(scheme: Scheme) -> tuple[float, float]:
    """Grows with the bits of a code, then with the scales that a row has."""
    weights = scheme.weights
    assert weights is not None
    return weights.bits, 1 / weights.group_size if weights.group_size else 0.0


def _changes(candidate: Any) -> dict[str, Any]:
    """The fields of a stage that a candidate sets."""
    if isinstance(candidate, int):
        if not 2 <= candidate <= 8:
            raise RequestError(f"candidates: bits are 2 to 8, not {candidate}")
        return {"bits": candidate}
    if isinstance(candidate, str):
        return {"scheme": candidate}
    allowed = ("scheme", *_GRID_FIELDS)
    unknown = next((key for key in candidate if key not in allowed), None)
    if unknown is not None:
        raise RequestError(f"candidates: '{unknown}' is no field of a candidate; allowed are {', '.join(allowed)}")
    try:
        QuantizeConfig.model_validate({"method": "", **candidate}, strict=True)
    except ValidationError as error:
        raise RequestError(f"candidates: {candidate}: {error.errors()[0]['msg']}") from None
    if isinstance(candidate.get("bits"), float):
        raise RequestError(f"candidates: bits of a candidate are a whole number, not {candidate['bits']}")
    return dict(candidate)


def _represented(config: QuantizeConfig, fields: dict[str, Any]) -> Representation:
    """Another representation than a grid, by its name and its own fields."""
    for key in _GRID_FIELDS:
        if getattr(config, key) is not None:
            raise RequestError(f"{key} is a field of grids; what a representation takes stands in scheme")
    if "representation" not in fields:
        raise RequestError("scheme is a mapping without 'representation', which names one; presets are a single word")
    try:
        return representation_of(fields)
    except (TypeError, ValueError) as error:
        raise RequestError(f"scheme: {error}") from None


def _activations(
    config: QuantizeConfig, activations: ActivationScheme | None, weights: GridScheme | None
) -> ActivationScheme | None:
    if config.activations is not None:
        kind: Literal["int", "float"] = "float" if config.activations == "fp8" else "int"
        activations = ActivationScheme(4 if config.activations == "int4" else 8, kind)
        if weights is not None and activations.type == "int" and weights.type == "float":
            raise RequestError(
                f"activations '{config.activations}' do not go with float weights: use scheme W8A8-INT8, W4A8 or W4A4"
            )
    if config.activation_mode is not None:
        if activations is None:
            raise RequestError(
                f"activation_mode '{config.activation_mode}' is given, but the activations are not quantized"
            )
        static = config.activation_mode == "static"
        activations = replace(activations, dynamic=not static, strategy="tensor" if static else "token")
    return _with_int8_tail(config, activations, weights)


def _with_int8_tail(
    config: QuantizeConfig, activations: ActivationScheme | None, weights: GridScheme | None
) -> ActivationScheme | None:
    """The scheme of activations with the features of 8 bits that a recipe or the preset asks for, in groups like the weights'."""
    tail = config.int8_channels or (activations.int8_tail if activations is not None else 0)
    if not tail:
        return activations
    size = None if weights is None or weights.strategy != "group" else weights.group_size
    if size is None:
        raise RequestError(
            "int8_channels are for weights on a grid with groups, such as scheme W4A4: give a group_size"
        )
    if activations is None or (activations.type, activations.dynamic) != ("int", True) or activations.bits == 8:
        raise RequestError(
            "int8_channels are for dynamic integer activations of fewer than 8 bits, as scheme W4A4 has them"
        )
    return replace(activations, strategy="group", group_size=size, int8_tail=tail)


def _with_group(weights: GridScheme, size: int | str) -> GridScheme:
    if size == "tensor":
        return replace(weights, strategy="tensor", group_size=None)
    if size in ("channel", -1):
        return replace(weights, strategy="channel", group_size=None)
    if not isinstance(size, int) or size < 1:
        raise RequestError(f"group_size {size} is not possible: give a positive number, -1, 'channel' or 'tensor'")
    if weights.type == "float":
        raise RequestError("fp8 weights have one scale a row or one in all: group_size must be 'channel' or 'tensor'")
    return replace(weights, strategy="group", group_size=size)


def check_fits(scheme: Scheme, shape: tuple[int, int], name: str = "weight") -> None:
    """Raise `RequestError` when a weight of `shape` (out, in) cannot have this scheme."""
    size = scheme.weights.group_size if isinstance(scheme.weights, GridScheme) else None
    if size is not None and size > shape[1]:
        text = f"group_size {size} is larger than the row of {shape[1]} weights"
        text += "" if scheme.grid is None else f"; give at most {shape[1]} or 'channel'"
        raise RequestError(f"{name}: {text}")
    reason = None if scheme.weights is None else scheme.weights.why_not(shape)
    reason = reason or why_not_inputs(scheme, shape)
    if reason is not None:
        raise RequestError(f"{name}: {reason}")
