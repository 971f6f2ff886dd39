"""Plan of an ahead-of-time export: launches of an artifact on each GPU, and its layers that no Triton kernel computes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import torch

from export.source import Source, dtype_name
from export.target import missing_packages
from export.triton_aot.options import TritonOptions
from runtime.engines.llama_structure import why_not as odd_structure
from runtime.kernels import REFERENCE, Layer, on_gpu

if TYPE_CHECKING:
    from export.triton_aot.launches import Launches

#: Names of kernels computed by Triton end so; the others are torch's.
_TRITON = "-triton"
#: Said of artifacts with a policy.
CACHE = (
    "its cache is compressed, and attention over it is not compiled ahead: triton compiles it where it is installed, "
    "plain torch computes it, slower, where it is not; runtime.load(..., kv_cache=False) takes a plain cache"
)


def dtype(source: Source, options: TritonOptions) -> torch.dtype:
    """What is computed in."""
    chosen: torch.dtype = source.dtype if options.dtype is None else getattr(torch, options.dtype)
    return chosen


def why_not(source: Source, options: TritonOptions) -> str | None:
    """As `Target.why_not`."""
    if not source.entries:
        return "it is not compressed, and only compressed artifacts are computed by Triton kernels"
    name = dtype_name(dtype(source, options))
    if name not in ("float16", "bfloat16"):
        return f"it computes in {name}, and the kernels in float16 and bfloat16; set dtype=bfloat16 (and load it so)"
    listed = {} if source.artifact.manifest is None else source.artifact.manifest["files"]
    taken = [name for name in listed if name in ("README.md", "export.json") or name.startswith("kernels/")]
    if taken:
        return f"its manifest lists {taken[0]}, which the export writes itself"
    if missing_packages(("triton",)):
        return None  # what is missing is said by name, and the kernels cannot be asked without it
    computed = [layers(source, options, capability) for capability in options.capabilities]
    kernels = {kernel for found in computed for kernel in found.values()}
    if any(kernel.endswith(_TRITON) for kernel in kernels):
        return None
    if kernels - {REFERENCE.name} and odd_structure(source.skeleton) is None:
        return None  # its layers are torch's (float8), and the fused engine's own kernels Triton's
    count = f"any of its {len(computed[0])} compressed layers"
    return f"no Triton kernel computes {count} on {', '.join(options.gpus)} ({tally(computed[0])})"


def layers(source: Source, options: TritonOptions, capability: int) -> dict[str, str]:
    """{compressed linear layer: the kernel that the runtime takes for it on this GPU}."""
    from runtime.kernels.triton import gpu

    found = {}
    with gpu.assuming(capability):
        for name, entry in source.entries.items():
            if name not in source.embeddings:
                layer = Layer(entry, source.shapes[name], dtype(source, options), torch.device("meta"))
                found[name] = on_gpu(layer)[0].name
    return found


def others(kernels: dict[str, str]) -> dict[str, str]:
    """Those of `layers` that Triton does not compute."""
    return {name: kernel for name, kernel in kernels.items() if not kernel.endswith(_TRITON)}


def has_policy(source: Source) -> bool:
    """Whether the artifact says how its cache is compressed."""
    return (source.artifact.manifest or {}).get("kv_cache") is not None


def launches(source: Source, options: TritonOptions, capability: int) -> Launches:
    """Everything that is to be compiled for one GPU."""
    from export.triton_aot.launches import find
    from runtime.engines.torch.engine import Blueprint

    compute = dtype(source, options)
    blueprint = Blueprint(source.artifact, torch.device("meta"), "auto", compute, source.trust_remote_code)
    if compute != source.dtype:
        cast(torch.nn.Module, blueprint.module).to(compute)
    return find(blueprint.module, capability, options.configs == "all", has_policy(source))


def tally(kernels: dict[str, str]) -> str:
    """How many layers each kernel computes."""
    return ", ".join(f"{count} {name}" for name, count in Counter(kernels.values()).most_common())
