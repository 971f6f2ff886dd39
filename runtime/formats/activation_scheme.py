"""Scheme of a layer's input: the numbers it is rounded to, what shares a scale, and when scales are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from runtime.formats.float8 import FLOAT8
from runtime.formats.representation import TensorSpec

#: Dtypes of scales that are not in the dtype of the model.
SCALE_DTYPES = {"e8m0": torch.uint8, "e4m3": FLOAT8}


@dataclass(frozen=True)
class ActivationScheme:
    """Grid of the input `[..., in]` of a linear layer.

    Attributes:
        bits, type: integers of so many bits, float8 e4m3 (8) or float4 e2m1 (4).
        dynamic: scales are made at run time (True) or calibrated (False); "local": those of groups at run time, and a calibrated one that
            all share.
        strategy: what shares a scale: a `token`, the whole `tensor`, or a `group` of features of a token; a `tensor_group` is one whose
            scale is divided by `input_global_scale` float32 `[1]`.
        group_size: features of a group.
        scales: numbers that scales of groups are rounded to: powers of two (`e8m0`) or float8 (`e4m3`); None: the dtype of the input.
        outliers: features of a token whose magnitude is above this stay as they are, and the scale is made for the rest; None: all are
            rounded. LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339) takes a feature out for all tokens of a batch where one of them
            has an outlier in it; here every token has outliers of its own, so that its result does not depend on the batch it is in.
        int8_tail: so many features at the end, whole groups, are rounded to 8 bits: those with outliers, which an `InputOrder` has brought
            there (Zhao et al., Atom, 2023, arXiv 2310.19102).
        prefix: token ids in front of every text that a static scale was calibrated on. Their own inputs, which may be outliers, do not
            count: the runtime computes their keys and values with inputs as they are (PrefixQuant, 2024, arXiv 2410.05265).
    """

    bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    dynamic: bool | Literal["local"] = True
    strategy: Literal["token", "tensor", "group", "tensor_group"] = "token"
    group_size: int | None = None
    scales: Literal["e8m0", "e4m3"] | None = None
    outliers: float | None = None
    int8_tail: int = 0
    prefix: tuple[int, ...] = ()

    @property
    def own(self) -> bool:
        """Whether compressed-tensors cannot express it."""
        return self.outliers is not None or self.int8_tail > 0 or bool(self.prefix)

    @property
    def calibrated(self) -> bool:
        """Whether the range of the inputs must be known before they are rounded."""
        return self.dynamic is not True

    @property
    def e2m1(self) -> bool:
        """Whether the numbers are float4."""
        return self.type == "float" and self.bits == 4

    def why_not(self, columns: int) -> str | None:
        """The reason inputs of so many features cannot be rounded so; None when they can."""
        kind, local = f"{self.type}{self.bits}", self.dynamic == "local"
        groups = self.strategy in ("group", "tensor_group")
        if not (2 <= self.bits <= 8 if self.type == "int" else self.bits in (4, 8)):
            return f"activations are integers of 2 to 8 bits, float8 or float4, not {kind}"
        if groups != (self.group_size is not None):
            return "activations have a group_size exactly when their strategy is 'group' or 'tensor_group'"
        if self.type == "float" and not self.symmetric and (groups or self.bits == 4):
            return f"{kind} activations in groups are symmetric"
        if (self.strategy == "tensor_group") != local or (self.scales == "e4m3") != local:
            return "activations with a global scale have strategy 'tensor_group', dynamic 'local' and scales of e4m3, all three or none"
        if self.dynamic is False and self.strategy != "tensor":
            return f"static activation scales are those of a tensor, not of a {self.strategy}"
        if self.prefix and self.dynamic is not False:
            return "activations have a prefix where their scale is static"
        if self.scales is not None and (not groups or self.type != "float"):
            return f"{self.scales} scales are for groups of float activations"
        if self.scales == "e8m0" and self.group_size != 32:
            return f"activations with e8m0 scales have groups of 32, not {self.group_size}"
        if self.outliers is not None:
            if (self.type, self.symmetric, self.dynamic, self.strategy) != ("int", True, True, "token"):
                return "activations that keep outliers are symmetric integers with one dynamic scale per token"
            if not 0 < self.outliers < math.inf:
                return f"the threshold of outliers is a positive number, not {self.outliers}"
        if self.int8_tail:
            kind_of_groups = (self.type, self.symmetric, self.dynamic, self.strategy)
            if kind_of_groups != ("int", True, True, "group") or self.bits > 7:
                return (
                    "activations with an int8_tail are symmetric integers of fewer bits in groups, with dynamic scales"
                )
            if self.int8_tail % (self.group_size or 1):
                return f"an int8_tail of {self.int8_tail} features is not whole groups of {self.group_size}"
            if self.int8_tail >= columns:
                return f"inputs of {columns} features cannot have {self.int8_tail} of 8 bits: give fewer than all"
        if self.e2m1 and self.scales is None:
            return "float4 activations have scales of e8m0 or e4m3"
        if self.group_size is not None and (self.group_size < 1 or columns % self.group_size):
            return f"inputs of {columns} features are not whole groups of {self.group_size}"
        return None

    def describe(self) -> str:
        """Short text for plans and reports: "a8 dynamic", or "a8 dynamic, outliers above 6 kept"."""
        when = self.dynamic if isinstance(self.dynamic, str) else "dynamic" if self.dynamic else "static"
        kept = "" if self.outliers is None else f", outliers above {self.outliers:g} kept"
        tail = f", {self.int8_tail} features a8" if self.int8_tail else ""
        behind = f" behind {len(self.prefix)} prefix token{'s' * (len(self.prefix) > 1)}" if self.prefix else ""
        return f"a{self.bits} {when}{behind}{kept}{tail}"

    def tensors(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """What calibration leaves on disk, `[1]` each, for scales of `dtype`: `input_scale` (and `input_zero_point`), or
        `input_global_scale`."""
        if self.dynamic == "local":
            return {"input_global_scale": TensorSpec((1,), torch.float32, (None,))}
        if self.dynamic:
            return {}
        specs = {"input_scale": TensorSpec((1,), dtype, (None,))}
        if not self.symmetric:
            specs["input_zero_point"] = TensorSpec((1,), torch.int8 if self.type == "int" else FLOAT8, (None,))
        return specs

    def to_config(self) -> dict[str, Any]:
        """In the words of compressed-tensors, and `outliers`, `int8_tail` and `prefix` where there are any."""
        fields = asdict(self)
        for name in ("outliers", "int8_tail", "prefix"):
            if not fields[name]:
                del fields[name]
        if self.prefix:
            fields["prefix"] = list(self.prefix)
        scales = fields.pop("scales")
        dtypes = {} if scales is None else dict.fromkeys(("scale_dtype", "zp_dtype"), str(SCALE_DTYPES[scales]))
        return {"num_bits": fields.pop("bits"), **fields, **dtypes}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> ActivationScheme:
        """What the `QuantizationArgs` of compressed-tensors mean. `group_size` and `scale_dtype` say nothing of a token or a tensor; float4
        without `scale_dtype` has the scales of its strategy.

        Raises:
            ValueError: scales of a dtype that this runtime does not have, a `group_size` or `int8_tail` that is no integer, `outliers` that
                is no number, a `prefix` that is no list of token ids.
        """
        dynamic, strategy = arguments["dynamic"], arguments["strategy"]
        size, dtype = arguments.get("group_size"), arguments.get("scale_dtype")
        outliers = arguments.get("outliers")
        if outliers is not None and (isinstance(outliers, bool) or not isinstance(outliers, int | float)):
            raise ValueError(f"outliers is {outliers!r}, expected a positive number")
        tail = arguments.get("int8_tail", 0)
        if isinstance(tail, bool) or not isinstance(tail, int) or tail < 0:
            raise ValueError(f"int8_tail is {tail!r}, expected a number of features")
        prefix = arguments.get("prefix", ())
        if not isinstance(prefix, list | tuple) or not all(type(token) is int and token >= 0 for token in prefix):
            raise ValueError(f"prefix is {prefix!r}, expected token ids")
        if strategy not in ("group", "tensor_group"):
            size = dtype = None
        elif not isinstance(size, int):
            raise ValueError(f"group_size is {size!r}, expected a positive integer")
        elif dtype is None and arguments["type"] == "float" and arguments["num_bits"] == 4:
            dtype = SCALE_DTYPES["e4m3" if strategy == "tensor_group" else "e8m0"]
        found = [name for name, known in SCALE_DTYPES.items() if str(dtype) == str(known)]
        if dtype is not None and not found:
            raise ValueError(f"scale_dtype is {dtype}, this runtime makes {', '.join(map(str, SCALE_DTYPES.values()))}")
        return cls(
            arguments["num_bits"],
            arguments["type"],
            arguments["symmetric"],
            dynamic if dynamic == "local" else bool(dynamic),
            strategy,
            size,
            found[0] if found else None,  # type: ignore[arg-type]
            None if outliers is None else float(outliers),
            tail,
            tuple(prefix),
        )
