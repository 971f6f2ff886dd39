"""Preset schemes by the names of compressed-tensors."""

from __future__ import annotations

from runtime.config.messages import did_you_mean
from runtime.errors import RequestError
from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.block_float import BlockFloat
from runtime.formats.dfloat11 import DFloat11
from runtime.formats.float8_block import Float8Block
from runtime.formats.grid import GridScheme
from runtime.formats.input_transform import InputOrder
from runtime.formats.k_quant import KINDS, KQuant
from runtime.formats.row_codebook import RowCodebook
from runtime.formats.scheme import Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.formats.trellis import Trellis


def _microscaled(bits: int) -> ActivationScheme:
    return ActivationScheme(bits, "float", strategy="group", group_size=32, scales="e8m0")


def _group(bits: int, symmetric: bool = True) -> GridScheme:
    return GridScheme(bits, "int", symmetric, "group", 128)


_NVFP4 = BlockFloat(4, group_size=16, scales="e4m3")

PRESETS: dict[str, Scheme] = {
    **{f"W{bits}A16": Scheme(_group(bits)) for bits in range(2, 8)},
    "W8A16": Scheme(GridScheme(8, "int", True, "channel")),
    "W4A16_ASYM": Scheme(_group(4, symmetric=False)),
    "W8A8-INT8": Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme()),
    "LLM.int8": Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(outliers=6.0)),
    "W4A8": Scheme(_group(4), ActivationScheme()),
    "W4A4": Scheme(_group(4), ActivationScheme(4)),
    "Atom": Scheme(
        _group(4),
        ActivationScheme(4, strategy="group", group_size=128, int8_tail=128),
        None,
        InputOrder("outliers_last"),
    ),
    "W4AFP8": Scheme(_group(4), ActivationScheme(8, "float")),
    "FP8": Scheme(GridScheme(8, "float", True, "tensor"), ActivationScheme(8, "float", True, False, "tensor")),
    "FP8_DYNAMIC": Scheme(GridScheme(8, "float", True, "channel"), ActivationScheme(8, "float")),
    "FP8_BLOCK": Scheme(Float8Block(), ActivationScheme(8, "float", strategy="group", group_size=128)),
    "NVFP4": Scheme(_NVFP4, ActivationScheme(4, "float", True, "local", "tensor_group", 16, "e4m3")),
    "NVFP4A16": Scheme(_NVFP4),
    "MXFP4": Scheme(BlockFloat(4), _microscaled(4)),
    "MXFP4A16": Scheme(BlockFloat(4)),
    "MXFP8": Scheme(BlockFloat(8), _microscaled(8)),
    "MXFP8A16": Scheme(BlockFloat(8)),
    **{kind: Scheme(KQuant(kind)) for kind in KINDS},
    "W2A16_TRELLIS": Scheme(Trellis()),
    **{f"W{bits}A16_CODEBOOK": Scheme(RowCodebook(bits)) for bits in (2, 3, 4)},
    "TERNARY": Scheme(TernaryDictionary()),
    "DF11": Scheme(DFloat11()),
}
ALIASES = {"W8A8": "W8A8-INT8", "INT8": "W8A8-INT8", "W8A8_INT8": "W8A8-INT8", "W4": "W4A16", "W8": "W8A16"}
ALIASES |= dict.fromkeys(("LLM.INT8()", "LLM_INT8", "LLM-INT8"), "LLM.int8")


def preset(name: str) -> Scheme:
    """The preset scheme of that name (case does not matter).

    Raises:
        RequestError: unknown name; the message has the nearest one.
    """
    names = {known.upper(): scheme for known, scheme in PRESETS.items()}
    names |= {alias: PRESETS[known] for alias, known in ALIASES.items()}
    if name.upper() in names:
        return names[name.upper()]
    raise RequestError(
        f"scheme '{name}' is unknown (known: {', '.join(PRESETS)}){did_you_mean(name, [*PRESETS, *ALIASES])}"
    )
