"""How a bundle or an engine is proven: logits and tokens beside those that the artifact (changed alike) gives.

A bundle's graph runs in ONNX Runtime, in float32 where that has no kernels for its type; an engine runs on the GPU itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from export.source import Source
from export.target import missing_packages, needs
from export.tensorrt.bundle import ONNX
from export.tensorrt.host import HostSession, NoKernelError
from export.tensorrt.kept import KeptProbe, compare_kept
from export.tensorrt.reference import Expected
from export.tensorrt.twin import write_twin
from export.verify import Logits, compare_logits, compare_tokens
from runtime.errors import RequestError

#: Mean KL and distance of two logits that arithmetic may swap, by `DataType` member and whether inputs are rounded to int8 or fp8.
#: float32: only the order of sums differs. 16 bits: every activation is rounded. Rounded inputs: a sum in another order may put one
#: of them on the neighbouring code.
LIMITS = {
    ("FLOAT", False): (1e-5, 0.02), ("FLOAT", True): (5e-3, 0.5),
    ("HALF", False): (0.01, 0.1), ("HALF", True): (0.02, 0.5),
    ("BF16", False): (0.05, 0.5), ("BF16", True): (0.1, 1.0),
}  # fmt: skip
_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Precision:
    """How exactly something computes.

    Attributes:
        dtype: `DataType` member of its floats.
        rounds_inputs: a layer's inputs are rounded to int8 or fp8 (with a calibrated scale).
        widens: every float of the artifact is one of `dtype` too, so that constants hold the artifact's own numbers.
    """

    dtype: str
    rounds_inputs: bool
    widens: bool

    @property
    def limits(self) -> tuple[float, float]:
        return LIMITS[self.dtype, self.rounds_inputs]

    def of_twin(self) -> Precision:
        """Of the float32 twin: float32, unless the constants themselves were rounded to fewer bits."""
        return Precision("FLOAT", self.rounds_inputs, True) if self.widens else self


@dataclass(frozen=True)
class Proof:
    """Loader, metrics, and what was not proven."""

    loader: str
    metrics: dict[str, Any]
    notes: list[str]


def precision(source: Source, dtype: str) -> Precision:
    """Of an export of `source` in `dtype`, a `DataType` member."""
    compute = getattr(torch, _NAMES[dtype])
    checkpoint = source.artifact.checkpoint
    stored = {checkpoint.dtype(name) for name in source.dense_names()} | {source.dtype}
    widens = all(torch.promote_types(kind, compute) == compute for kind in stored if kind.is_floating_point)
    schemes = [entry.scheme for name, entry in source.entries.items() if name not in source.embeddings]
    rounds = any(s.activations is not None and not s.activations.dynamic for s in schemes)
    return Precision(dtype, rounds, widens)


def compare(
    expected: Expected,
    logits: Logits,
    generate: Callable[[list[list[int]], int], list[list[int]]],
    limits: tuple[float, float],
) -> dict[str, Any]:
    """Logits and tokens of an engine beside the expected ones, and what the change costs, if there is one.

    Raises:
        CompressError: it does not compute what the artifact, changed alike, computes.
    """
    probe, (kl_limit, tie) = expected.probe, limits
    kept = isinstance(probe, KeptProbe)
    metrics = compare_kept(probe, logits, kl_limit) if kept else compare_logits(probe, logits, kl_limit)  # type: ignore[arg-type]
    return metrics | compare_tokens(probe, generate, tie) | expected.change


def prove_bundle(folder: Path, expected: Expected, found: Precision) -> Proof:
    """The bundle's graph in ONNX Runtime.

    Raises:
        RequestError: ONNX Runtime is not installed.
        CompressError: ONNX Runtime refuses the graph, or the numbers are not the expected ones.
    """
    packages = missing_packages(["onnxruntime"])
    if packages:
        raise RequestError(f"the proof of a bundle {needs(packages, 'onnx')}, or leave the proof out with --no-verify")
    missing = "it has no bfloat16 kernels on CPUs"
    if found.dtype != "BF16":
        try:
            return _run(folder / ONNX, expected, found.limits, "", [])
        except NoKernelError as error:
            missing = str(error)
    if found.dtype == "FLOAT":
        return Proof("", {}, [f"tokens were not compared: ONNX Runtime has no kernel here ({missing})"])
    kind = _NAMES[found.dtype]
    note = f"ONNX Runtime ran the graph and its {kind} constants in float32, not in {kind}: {missing}"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.twin") as beside:
        twin = write_twin(folder / ONNX, Path(beside))
        try:
            return _run(twin, expected, found.of_twin().limits, " (the float32 twin of the graph)", [note])
        except NoKernelError as error:
            return Proof("", {}, [f"tokens were not compared: ONNX Runtime has no kernel here ({error})"])


def _run(path: Path, expected: Expected, limits: tuple[float, float], what: str, notes: list[str]) -> Proof:
    session = HostSession(path)
    metrics = compare(expected, session.logits, session.generate, limits)
    return Proof(f"ONNX Runtime {session.version}{what}", metrics, notes)
