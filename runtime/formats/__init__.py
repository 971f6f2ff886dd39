"""Storage formats, one file each. `get` one by name, or let `choose` pick the one that fits a scheme.

To add a format: write one file with a `Format` subclass and add it to `_FORMATS`.
"""

from __future__ import annotations

import difflib
import re

import torch

from runtime.errors import RequestError
from runtime.formats.base import Format
from runtime.formats.bitmap import Bitmap
from runtime.formats.checks import Shape, Tensors, TensorSpec
from runtime.formats.float_quantized import FloatQuantized
from runtime.formats.int_quantized import IntQuantized
from runtime.formats.pack_quantized import PackQuantized
from runtime.formats.packed import Packed
from runtime.formats.scheme import Scheme
from runtime.formats.sparse24 import Sparse24

__all__ = ["Format", "TensorSpec", "choose", "density_of", "get", "names", "value_count"]

# Compressed-tensors formats first: what another engine can read is preferred.
_FORMATS: tuple[Format, ...] = (PackQuantized(), IntQuantized(), FloatQuantized(), Packed(), Sparse24(), Bitmap())
_BY_NAME = {f.name: f for f in _FORMATS}


def names() -> list[str]:
    """Names of all formats, compressed-tensors ones first."""
    return list(_BY_NAME)


def get(name: str) -> Format:
    """The format called `name`; RequestError with the nearest name otherwise."""
    if name not in _BY_NAME:
        near = difflib.get_close_matches(str(name), _BY_NAME, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(f"unknown storage format {name!r}, known: {', '.join(_BY_NAME)}{hint}")
    return _BY_NAME[name]


def choose(scheme: Scheme, shape: Shape, density: float | None = None) -> Format:
    """The format that stores `scheme` at `shape = (out, in)` in the fewest bytes; at equal size the first of `names()`.

    Only a sparse scheme has formats of different size to choose from: a pruned matrix goes to `sparse24` or `bitmap`
    when that beats storing the zeros. `density` is the kept fraction; without it, it is read off the pattern (N/M;
    0.5 for the patterns that do not tell). Weights whose activations are quantized too are stored dense, because that
    is what integer matrix units read.

    Raises:
        RequestError: no format can store it; the message gives each format's reason.
    """
    reasons = {f.name: f.why_not(scheme, shape) for f in _FORMATS}
    able = [f for f in _FORMATS if reasons[f.name] is None]
    if not able:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise RequestError(f"no storage format can hold a weight of shape {list(shape)} with this scheme ({listed})")
    if scheme.sparsity is None:
        return able[0]
    kept = density_of(scheme.sparsity) if density is None else density
    return min(able, key=lambda f: f.bytes_estimate(scheme, shape, torch.bfloat16, kept))


def density_of(sparsity: str | None) -> float:
    """Kept fraction that a pattern promises at most: N/M for `N:M`, 1 for none, 0.5 where the pattern does not say."""
    if sparsity is None:
        return 1.0
    match = re.fullmatch(r"(\d+):(\d+)", sparsity)
    return int(match[1]) / int(match[2]) if match and int(match[2]) else 0.5


def value_count(storage: Format, tensors: Tensors) -> int | None:
    """How many values packed tensors hold, for the formats whose size depends on it (`bitmap`); None for the others."""
    return storage.stored_count(tensors)
