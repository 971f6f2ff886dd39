"""Storage formats, one file each. `get` one by name, or let `choose` pick the one that fits a scheme.

To add a format: write one file with a `Format` subclass and add it to `_BUILT_IN`; to add a representation, a file with a `Representation`
subclass. Other packages register either under the entry-point group `compress.formats`.
"""

from __future__ import annotations

import re
from functools import cache

import torch

from runtime.config.messages import did_you_mean
from runtime.errors import RequestError
from runtime.formats import representation
from runtime.formats.base import Format, OwnFormat
from runtime.formats.bitmap import Bitmap
from runtime.formats.compressed_tensors import BlockFloats, Naive, Packed, PackQuantized
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.k_quant import KQuant
from runtime.formats.representation import Shape, TensorSpec
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import Scheme
from runtime.formats.sparse24 import Sparse24
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis

__all__ = ["Format", "TensorSpec", "choose", "density_of", "get", "names"]

# Compressed-tensors formats first: what another engine can read is preferred.
_BUILT_IN: tuple[Format, ...] = (
    PackQuantized(),
    Naive("int"),
    Naive("float"),
    BlockFloats("nvfp4-pack-quantized", 4, "e4m3"),
    BlockFloats("mxfp4-pack-quantized", 4, "e8m0"),
    BlockFloats("mxfp8-quantized", 8, "e8m0"),
    OwnFormat(KQuant),
    OwnFormat(DFloat11),
    OwnFormat(Trellis),
    OwnFormat(RowCodebook),
    OwnFormat(TernaryDictionary),
    Packed(),
    Sparse24(),
    Bitmap(),
)


@cache
def _formats() -> dict[str, Format]:
    """Every format by name; those of this package first, which no other replaces."""
    found = {storage.name: storage for storage in _BUILT_IN}
    for value in representation.plugins():
        storage: Format = OwnFormat(value) if issubclass(value, representation.Representation) else value()
        found.setdefault(storage.name, storage)
    return found


def names() -> list[str]:
    """Names of all formats, compressed-tensors ones first."""
    return list(_formats())


def get(name: str) -> Format:
    """The format called `name`; RequestError with the nearest name otherwise."""
    if name not in _formats():
        hint = did_you_mean(name, names())
        raise RequestError(f"unknown storage format {name!r}, known: {', '.join(names())}{hint}")
    return _formats()[name]


def choose(scheme: Scheme, shape: Shape, density: float | None = None) -> Format:
    """The format that stores `scheme` at `shape = (out, in)` in the fewest bytes; at equal size the first of `names()`.

    Only a sparse scheme has formats of different size to choose from: a pruned matrix goes to `sparse24` or `bitmap`
    when that beats storing the zeros. `density` is the kept fraction; without it, it is read off the pattern (N/M;
    0.5 for the patterns that do not tell). Weights whose activations are quantized too are stored dense, zeros
    included, because matrix units read dense weights.

    Raises:
        RequestError: no format can store it; the message gives each format's reason.
    """
    reasons = {name: storage.why_not(scheme, shape) for name, storage in _formats().items()}
    able = [storage for name, storage in _formats().items() if reasons[name] is None]
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
