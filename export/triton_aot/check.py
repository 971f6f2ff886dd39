"""Proof of an export to triton: binaries read back, compiled again, files intact, and on a GPU the kernels themselves."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from export.target import Job, Verification
from export.triton_aot.build import Task, build
from export.verify import compare_logits, load_artifact, probe
from runtime.checkpoint.artifact import Artifact
from runtime.errors import CompressError
from runtime.kernels.triton.cubins import FOLDER, INDEX, Cubin, read_cubin, read_index, runs_on

_AGAIN = 3  # kernels compiled a second time for each GPU
_KL = 1e-3  # between kernels compiled here and now by triton and the same compiled ahead


def verify(job: Job) -> Verification:
    """As `Target.verify`."""
    job.progress.phase("reading the kernels back", 1)
    cubins = read_index(job.folder)
    for cubin in cubins:
        read_cubin(job.folder, cubin)
        check(job.folder / FOLDER / cubin.file, cubin)
    metrics: dict[str, Any] = {"kernels": len(cubins)}
    notes = compile_again(job, cubins, metrics)
    if job.source.artifact.manifest is not None:
        Artifact(job.folder).verify()
    notes += _compare_files(job, metrics)
    notes += compare_on_gpu(job, cubins, metrics)
    checked = "every cubin has its kernel, architecture and arguments, some were compiled a second time to the same PTX"
    if "logit_difference" in metrics:
        checked += ", and the artifact's files give the artifact's logits on a CPU"
    if "gpu_kl" in metrics:
        checked += "; on a GPU the kernels give the logits of kernels compiled there"
    return Verification(f"compress runtime, triton {triton.__version__}", checked, metrics, notes)


def check(file: Path, cubin: Cubin) -> None:
    """Raise CompressError unless a binary, as NVIDIA's own tool reads it, is what its entry of the index says."""
    done = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-elf", str(file)], capture_output=True, text=True)
    found = re.search(r"\bsm=(\w+)", done.stdout)
    if done.returncode or found is None:
        reason = (done.stderr.strip().splitlines() or ["it has no header"])[-1]
        raise CompressError(f"{file.name} is no cubin: {reason}")
    if f"sm_{found[1]}" != cubin.architecture:
        raise CompressError(f"{file.name} is for sm_{found[1]}, the index says {cubin.architecture}")
    pattern = rf"^\.nv\.info\.{re.escape(cubin.symbol)}$(.*?)(?=^\S|\Z)"
    section = re.search(pattern, done.stdout, re.MULTILINE | re.DOTALL)
    if section is None:
        raise CompressError(f"{file.name} has no kernel {cubin.symbol}")
    numbers = re.findall(r"Ordinal\s*: (\w+)\s+Offset\s*: (\w+)\s+Size\s*: (\w+)", section[1])
    there = [(offset, size) for _, offset, size in sorted(tuple(int(n, 16) for n in line) for line in numbers)]
    wanted, end = [], 0
    for size in [*cubin.variant.sizes, *[8] * cubin.scratch_pointers]:
        start = -(-end // size) * size
        wanted.append((start, size))
        end = start + size
    if there != wanted:
        raise CompressError(f"{file.name} takes arguments at (offset, bytes) {there}, the index says {wanted}")


def compile_again(job: Job, cubins: Sequence[Cubin], metrics: dict[str, Any]) -> list[str]:
    """A few kernels of each GPU, compiled by new processes: their PTX must be the same; returns what to say of other binaries.

    Raises:
        CompressError: a kernel compiles to something else.
    """
    some: list[tuple[Task, Cubin]] = []
    for capability in job.options.capabilities:
        mine: dict[str, Cubin] = {}
        for cubin in cubins:
            if cubin.architecture.rstrip("a") == f"sm_{capability}":
                mine.setdefault(cubin.variant.kernel, cubin)
        some += [(Task(cubin.variant, capability), cubin) for cubin in list(mine.values())[:_AGAIN]]
    job.progress.phase(f"compiling {len(some)} kernels again", len(some))
    listed = json.loads((job.folder / FOLDER / INDEX).read_text(encoding="utf-8"))["kernels"]
    ptx = {entry["file"]: entry["ptx_sha256"] for entry in listed}
    other = []
    for built, (_, cubin) in zip(build([task for task, _ in some], lambda _: job.progress.step()), some, strict=True):
        if built.entry.get("ptx_sha256") != ptx[cubin.file]:
            raise CompressError(f"{cubin.file} compiles to something else a second time {built.error}")
        if built.cubin != read_cubin(job.folder, cubin):
            other.append(cubin.file)
    metrics |= {"compiled_again": len(some), "same_bytes": len(some) - len(other)}
    if not other:
        return []
    return [f"NVIDIA's assembler made other binaries of the same PTX for {len(other)} kernels, such as {other[0]}"]


def _compare_files(job: Job, metrics: dict[str, Any]) -> list[str]:
    """Logits of the artifact's files in the export, on a CPU; returns what could not be compared."""
    from runtime.modeling.skeleton import model_kind

    if model_kind(job.source.config) != "decoder":
        return ["logits were not compared: the model is no decoder (its files have the artifact's hashes)"]
    job.progress.phase("comparing logits on a CPU", 1)
    reference = probe(job)
    metrics |= compare_logits(reference, load_artifact(job.source, job.folder).logits, 0.0)
    if metrics["logit_difference"]:
        difference = metrics["logit_difference"]
        raise CompressError(f"the export's files give other logits than the artifact, by {difference:g}")
    return []


def compare_on_gpu(job: Job, cubins: Sequence[Cubin], metrics: dict[str, Any]) -> list[str]:
    """On a GPU that the kernels are for: logits with them against those with kernels compiled now; returns what was not run."""
    if not torch.cuda.is_available():
        return ["there is no GPU here: the kernels were compiled and read back, and none was run"]
    major, minor = torch.cuda.get_device_capability()
    compiled = {cubin.architecture.rstrip("a"): cubin.architecture for cubin in reversed(cubins)}
    others = [gpu for gpu in job.options.gpus if not runs_on(compiled.get(gpu, gpu), 10 * major + minor)]
    if len(others) == len(job.options.gpus):
        return [f"the GPU here is sm_{major}{minor}: no kernel was run"]
    reference, logits, missing = gpu_logits(job)
    found = compare_logits(reference, lambda rows: logits, _KL)
    metrics |= {f"gpu_{name}": value for name, value in found.items()}
    notes = [f"kernels for {', '.join(others)} were not run: the GPU here is sm_{major}{minor}"] if others else []
    return notes + [f"{missing} launches found no kernel compiled ahead, and triton compiled them"] * (missing > 0)


def gpu_logits(job: Job) -> tuple[Any, torch.Tensor, int]:
    """Probe with kernels that triton compiles now, logits of its rows with those of the export, launches that had none."""
    from runtime.kernels.triton import aot

    def logits(path: Path) -> torch.Tensor:
        found: torch.Tensor = load_artifact(job.source, path, device="cuda", dtype=job.facts["dtype"]).logits(base.rows)
        return found.float().cpu()

    base = probe(job)
    aot.withdraw()
    reference = replace(base, logits=logits(job.source.path))
    found = logits(job.folder)
    missing = aot.missed()
    aot.withdraw()
    return reference, found, missing
