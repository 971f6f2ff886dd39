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

import hashlib
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from export.folder import TOKENIZER_FILES, write_json
from export.source import Source, dtype_name
from export.target import Job, Target, Verification
from export.triton_aot import plan
from export.triton_aot.build import Built, Task, build
from export.triton_aot.options import TritonOptions
from runtime.checkpoint.artifact import MANIFEST
from runtime.errors import CompressError
from runtime.kernels.triton.cubins import FOLDER, INDEX, SCHEMA_VERSION
from runtime.kernels.triton.jit import Entry

_LINKED = 1 << 20  # bytes from which on a file is linked instead of copied, where the disk can
#: Bytes of shared memory that a program may have (CUDA C programming guide, table of compute capabilities).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


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
        import triton

        copy(job.source, job.folder)
        tasks: list[Task] = []
        engine = None
        stays = {}
        for capability in job.options.capabilities:
            found = plan.launches(job.source, job.options, capability)
            tasks += [Task(variant, capability) for variant in found.variants]
            engine = found.engine
            left = plan.others(found.kernels)
            if left:
                count = f"{len(left)} of {len(found.kernels)} layers stay on other kernels ({plan.tally(left)})"
                job.progress.warn(f"sm_{capability}: {count}")
                stays[f"sm_{capability}"] = left
        note = plan.cache_note(job.source)
        if note is not None:
            job.progress.warn(note)
        built = compile_all(job, tasks)
        folder = job.folder / FOLDER
        folder.mkdir()
        kernels = [_store(folder, one) for one in built]
        index = {"schema_version": SCHEMA_VERSION, "triton": triton.__version__, "kernels": kernels}
        write_json(folder / INDEX, index)
        _facts(job, built, engine, stays)

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


def copy(source: Source, folder: Path) -> None:
    """Every file of the artifact; large ones as further names of the same file where the disk allows it."""
    manifest = source.artifact.manifest
    if manifest is not None:
        names = [MANIFEST, *manifest["files"]]
    else:
        extra = ("config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_FILES)
        names = [*source.artifact.checkpoint.headers, *(name for name in extra if (source.path / name).is_file())]
        if source.trust_remote_code:
            names += sorted(path.name for path in source.path.glob("*.py"))
    for name in dict.fromkeys(names):
        origin, target = (source.path / name).resolve(), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if origin.stat().st_size >= _LINKED:
            with suppress(OSError):  # another disk, or one without links
                os.link(origin, target)
                continue
        shutil.copyfile(origin, target)


def compile_all(job: Job, tasks: list[Task]) -> list[Built]:
    """Compile the kernels, in parallel.

    Raises:
        CompressError: none could be compiled, or one of the default configurations could not.
    """
    job.progress.phase(f"compiling {len(tasks)} kernels for {', '.join(job.options.gpus)}", len(tasks))
    lock = threading.Lock()

    def done(one: Built) -> None:
        with lock:
            job.progress.step(f"sm_{one.task.capability} {one.task.variant.kernel}")

    good = []
    for one in build(tasks, done):
        limit, wanted = SHARED[one.task.capability], one.entry.get("shared", 0)
        reason = one.error
        if wanted > limit:
            reason = f"it wants {wanted} bytes of shared memory, {limit} are there"
        if reason:
            what = f"{one.task.variant.describe()} for sm_{one.task.capability}"
            if job.options.configs == "default":
                raise CompressError(f"{what} cannot be compiled: {reason}")
            job.progress.warn(f"{what} is left out: {reason}")
        else:
            good.append(one)
    if not good:
        raise CompressError("none of the kernels could be compiled")
    return good


def _store(folder: Path, one: Built) -> dict[str, object]:
    """Write a cubin; returns its entry of the index."""
    variant = one.task.variant
    if one.entry["scratch_pointers"] < 0:
        raise CompressError(f"{variant.describe()} takes fewer than the {len(variant.passed)} arguments passed")
    told = hashlib.sha256(variant.describe().encode()).hexdigest()[:16]
    name = f"{one.entry['architecture']}-{Entry.known[variant.kernel].__name__.strip('_')}-{told}.cubin"
    (folder / name).write_bytes(one.cubin)
    return {"file": name, "sha256": hashlib.sha256(one.cubin).hexdigest(), "bytes": len(one.cubin), **one.entry}


def _facts(job: Job, built: list[Built], engine: str | None, stays: dict[str, dict[str, str]]) -> None:
    import triton

    count: dict[str, dict[str, int]] = {}
    for one in built:
        here = count.setdefault(f"sm_{one.task.capability}", {"kernels": 0, "bytes": 0, "spilling": 0})
        here["kernels"] += 1
        here["bytes"] += len(one.cubin)
        here["spilling"] += one.entry["spill_bytes"] > 0
    job.facts |= {
        "gpus": count,
        "configs": job.options.configs,
        "dtype": dtype_name(plan.dtype(job.source, job.options)),
        "triton": triton.__version__,
        "engine": "the lean GPU engine" if engine is None else f"transformers' modules ({engine})",
        "layers_on_other_kernels": stays,
    }
    note = plan.cache_note(job.source)
    if note is not None:
        job.facts["cache"] = note
    job.facts["say"] = [f"{gpu}: {c['kernels']} kernels, {c['bytes'] / 1e6:.1f} MB" for gpu, c in count.items()]
