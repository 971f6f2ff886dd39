"""The file of constants beside a stripped plan.

A safetensors file of flat uint8 tensors, one a constant, under the names that the network's weights have; the header's metadata
says under `constants` the TensorRT type and the number of elements of each (4-bit codes lie two a byte).
`runtime.engines.tensorrt.engine` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from export.tensorrt.weights import Weight


def write_constants(used: Mapping[str, Weight], path: Path) -> None:
    """Write all constants of a network."""
    from safetensors.numpy import save_file

    kinds = {name: {"dtype": weight.dtype, "count": weight.count} for name, weight in used.items()}
    save_file({name: weight.data for name, weight in used.items()}, path, metadata={"constants": json.dumps(kinds)})
