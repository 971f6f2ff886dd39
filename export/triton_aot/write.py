"""Writer of an ahead-of-time export: the artifact's files as they are, and `kernels/`."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import triton

from export.folder import TOKENIZER_FILES, write_json
from export.source import Source, dtype_name
from export.target import Job
from export.triton_aot import plan
from export.triton_aot.build import Built, Task, build
from runtime.checkpoint.artifact import MANIFEST
from runtime.errors import CompressError
from runtime.kernels.triton.cubins import FOLDER, INDEX, SCHEMA_VERSION
from runtime.kernels.triton.jit import Entry

_LINKED = 1 << 20  # bytes from which on a file is linked instead of copied, where the disk can
#: Bytes of shared memory that a program may have (CUDA C programming guide, table of compute capabilities).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def write(job: Job) -> None:
    """As `Target.write`."""
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
    if plan.has_policy(job.source):
        job.progress.warn(plan.CACHE)
    if not tasks:
        raise CompressError("there is no kernel to compile for this artifact")
    built = compile_all(job, tasks)
    folder = job.folder / FOLDER
    folder.mkdir()
    kernels = [_store(folder, one) for one in built]
    index = {"schema_version": SCHEMA_VERSION, "triton": triton.__version__, "kernels": kernels}
    write_json(folder / INDEX, index)
    _facts(job, built, engine, stays)


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
        limit = SHARED[one.task.capability]
        reason = one.error
        if one.shared > limit:
            reason = f"it wants {one.shared} bytes of shared memory, {limit} are there"
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
    if one.scratch_pointers < 0:
        raise CompressError(f"{variant.describe()} takes fewer than the {len(variant.passed)} arguments passed")
    entry = Entry.known[variant.kernel]
    told = hashlib.sha256(variant.describe().encode()).hexdigest()[:16]
    name = f"{one.architecture}-{entry.__name__.strip('_')}-{told}.cubin"
    (folder / name).write_bytes(one.cubin)
    return {
        "file": name, "sha256": hashlib.sha256(one.cubin).hexdigest(), "bytes": len(one.cubin), "ptx_sha256": one.ptx_sha256,
        "architecture": one.architecture, "kernel": variant.kernel, "source": entry.source, "symbol": one.symbol,
        "arguments": dict(variant.arguments), "options": dict(variant.options),
        "num_warps": one.num_warps, "shared": one.shared, "scratch_pointers": one.scratch_pointers,
        "registers": one.registers, "spill_bytes": one.spill_bytes,
    }  # fmt: skip


def _facts(job: Job, built: list[Built], engine: str | None, stays: dict[str, dict[str, str]]) -> None:
    count: dict[str, dict[str, int]] = {}
    for one in built:
        here = count.setdefault(f"sm_{one.task.capability}", {"kernels": 0, "bytes": 0, "spilling": 0})
        here["kernels"] += 1
        here["bytes"] += len(one.cubin)
        here["spilling"] += one.spill_bytes > 0
    job.facts |= {
        "gpus": count,
        "configs": job.options.configs,
        "dtype": dtype_name(plan.dtype(job.source, job.options)),
        "triton": triton.__version__,
        "engine": "the lean GPU engine" if engine is None else f"transformers' modules ({engine})",
        "layers_on_other_kernels": stays,
    }
    if plan.has_policy(job.source):
        job.facts["cache"] = plan.CACHE
    job.facts["say"] = [f"{gpu}: {c['kernels']} kernels, {c['bytes'] / 1e6:.1f} MB" for gpu, c in count.items()]
