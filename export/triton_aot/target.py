"""Triton target: the artifact, and beside it its GPU kernels compiled ahead.

A production machine loads the export as it loads the artifact, `runtime.load(directory)`, and launches the cubins in `kernels/`
through the CUDA driver: no compiler, no C compiler, no triton. Compiled are the kernels that the runtime would launch for this
artifact on the GPUs named: its layers for every number of rows, and what the fused engine launches between them (norms, rotation,
paged attention). They are compiled with torch's dtype, so a production machine that loads with another `dtype` has none.

- One export serves all GPUs named. Code for sm_90 and sm_100 runs on compute capability 9.0 and 10.0 only; that for sm_80 also on 8.6
  and 8.9, where configurations that want more shared memory than these have are passed over by tuning.
- `configs=all` holds every launch configuration that tuning may choose; the machine still measures them once (some seconds) and
  remembers the choice. With `configs=default` nothing is measured: the first configuration of each kernel is all there is.
- A launch that no kernel is right for (a batch whose addresses are not divisible by 16, say) is compiled by triton where it is
  installed, and computed in plain torch, slower, where it is not. The log says which.
- Kernels are launched only by a runtime with the same kernel sources (a hash in the index); after an update of this package that
  changed one, export again. A cubin whose SHA-256 is wrong is refused.
- Layers that Triton does not compute (float8 on H100, which torch multiplies; unquantized ones) stay on their kernels; the export names
  them.
- Attention over a compressed cache is not compiled ahead: its kernels depend on the policy, which may be given when loading, and on
  how the cache fills. Without triton plain torch computes it, slower. An artifact with a policy brings it along, and the export says so;
  compiled are kernels for both, its layers as they compute beside a compressed cache, and the fused engine (`kv_cache=False`).
- A warmed `TRITON_CACHE_DIR` cannot take their place: its keys hold a hash of Triton's own files and the line where a kernel begins, and
  Triton compiles its driver and a launcher for each signature with a C compiler against libcuda when it first launches.
- Cubins are programs. They run on the GPU with the memory of the process there; load exports from where you would install software from.
"""

from __future__ import annotations

from typing import Any

from export.source import Source
from export.target import Job, Target, Verification
from export.triton_aot import plan
from export.triton_aot.options import TritonOptions


class TritonTarget(Target):
    """See the top of this file."""

    name = "triton"
    summary = "The artifact with its Triton kernels compiled ahead for named GPUs; production needs no compiler and no triton."
    extra = "gpu"
    packages = ("triton",)
    options = TritonOptions
    keeps_cache = True  # the folder is the artifact, its compress.json among the files

    def why_not(self, source: Source, options: Any) -> str | None:
        return plan.why_not(source, options)

    def bytes_needed(self, source: Source, options: Any) -> int:
        return source.bytes + (64 << 20)

    def write(self, job: Job) -> None:
        from export.triton_aot.write import write

        write(job)

    def verify(self, job: Job) -> Verification:
        from export.triton_aot.check import verify

        return verify(job)

    def usage(self, job: Job, folder: str) -> list[str]:
        dtype = "" if job.options.dtype is None else f', dtype="{job.options.dtype}"'
        return [
            "import runtime",
            f'model = runtime.load("{folder}", device="cuda"{dtype})  # on {", ".join(job.options.gpus)}, without triton',
            'print(model.generate("Once", max_new_tokens=32))',
        ]
