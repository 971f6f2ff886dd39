"""TensorRT target: an engine where TensorRT and a GPU are, the build bundle everywhere else."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from export.folder import copy_files
from export.onnx_graph.dialect import dialect
from export.onnx_graph.write import sparse_modules, write_graphs
from export.source import Source, dtype_name
from export.target import Conversion, Job, Target, Verification
from export.tensorrt import build
from export.tensorrt.bundle import (
    BUILD,
    DATA,
    ONNX,
    Build,
    Bundle,
    load_expected,
    read_build,
    save_expected,
    write_build,
)
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.profiles import limits, read_model
from export.tensorrt.proof import LIMITS, TYPES, compare, expected_probe, prove_bundle, rounds_inputs
from export.tensorrt.support import conversions, dropped_activations, expressible, reason_against
from runtime.engines.tensorrt.engine import finishing
from runtime.errors import CompressError, RequestError


class TensorrtTarget(Target):
    """See the module."""

    name: ClassVar[str] = "tensorrt"
    summary: ClassVar[str] = "A TensorRT engine; without TensorRT or a GPU the bundle that it is built from."
    extra: ClassVar[str | None] = "tensorrt"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnx_ir")
    options = TensorrtOptions
    transforms_inputs: ClassVar[bool] = True

    def open(self, path: str | Path, trust_remote_code: bool) -> Any:
        """A bundle to finish, or an artifact."""
        return Bundle(Path(path)) if (Path(path) / BUILD).is_file() else super().open(path, trust_remote_code)

    def why_not(self, source: Source | Bundle, options: Any) -> str | None:
        if isinstance(source, Bundle):
            source.check_options(options)
            return None
        reason = reason_against(source, options)
        if reason is not None:
            return reason
        try:
            limits(options, read_model(source))
        except AttributeError as error:
            return f"its configuration has no {error.name}, which the profiles of an engine need"
        return None

    def conversions(self, source: Source | Bundle, options: Any) -> list[Conversion]:
        return source.build.conversions if isinstance(source, Bundle) else conversions(source, options)

    def bytes_needed(self, source: Source | Bundle, options: Any) -> int:
        # ONNX file and plan lie there at the same time.
        return source.bytes * 2 + (64 << 20) if isinstance(source, Bundle) else _bytes_needed(source, options.dtype)

    # ---------------------------------------------------------------- writing
    def write(self, job: Job) -> None:
        source: Source | Bundle = job.source
        if job.options.bundle and job.options.require_engine:
            raise RequestError("options bundle and require_engine exclude each other")
        reason = build.missing()
        if reason is not None and (job.options.require_engine or isinstance(source, Bundle)):
            raise RequestError(f"no engine can be built here: {reason}; run this where the engine is to run")
        copy_files(source.path, job.folder)
        if isinstance(source, Bundle):
            job.losses.update(source.build.losses)
            self._engine(job, source.path, source.build)
            copy_files(source.path, job.folder, ["config.json"])
            return
        config = {key: value for key, value in source.artifact.config.items() if key != "quantization_config"}
        (job.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if reason is not None or job.options.bundle:
            write_build(job.folder, _write_onnx(job, job.folder))
            reason, command = reason or "option bundle asks for the bundle only", finishing(str(job.output))
            job.facts |= {
                "engine": False,
                "reason": reason,
                "finish": command,
                "say": [
                    f"No engine was built: {reason}. This is the build bundle.",
                    f"To finish it, on a machine with TensorRT and the GPU that is to run the engine: {command}",
                ],
            }
            return
        # The plan goes where the export goes; the ONNX file lies beside it only while it is needed.
        with tempfile.TemporaryDirectory(dir=job.folder.parent, prefix=f"{job.folder.name}.onnx") as beside:
            self._engine(job, Path(beside), _write_onnx(job, Path(beside)))

    def _engine(self, job: Job, source: Path, recorded: Build) -> None:
        """Build the plan from the ONNX file in `source`."""
        gpu = build.gpu()
        assert gpu is not None
        if job.options.network == "native":
            job.progress.warn(
                "network=native is built by TensorRT's ONNX parser: NVIDIA's attention layer with key_value_lengths failed or computed "
                "garbage on some releases and GPUs"
            )
        size = limits(job.options, recorded.model)
        found = build.build_engine(build.api(), job, source, recorded, size)
        if found["constants"]:  # a stripped plan takes its weights from the ONNX file again
            copy_files(source, job.folder, (ONNX, DATA))
        where = f"{gpu['name']} (compute capability {gpu['compute_capability']}) with TensorRT {found['tensorrt']}"
        job.facts |= {
            **found,
            "engine": True,
            "dtype": recorded.dtype,
            "changed": recorded.changed,
            "rounds_inputs": recorded.rounds_inputs,
            "gpu": gpu,
            "limits": asdict(size),
            "network_layers": found["layers"],
            **asdict(recorded.model),
            "say": [f"The engine runs on {where}."],
        }

    # ---------------------------------------------------------------- proof
    def verify(self, job: Job) -> Verification:
        if not job.facts["engine"]:
            return self._verify_bundle(job)
        expected = load_expected(job.source.path) if isinstance(job.source, Bundle) else expected_probe(job)
        if expected is None:
            raise CompressError(f"{job.source.path} was written without proof; finish it with --no-verify too")
        from runtime.engines.base import EngineOptions
        from runtime.engines.tensorrt.engine import load_tensorrt

        export: Any = SimpleNamespace(path=job.folder, facts=job.facts)
        bounds = LIMITS[job.facts["dtype"], job.facts["rounds_inputs"]]
        metrics = compare(expected, load_tensorrt(export, torch.device("cuda"), EngineOptions()), export, bounds)
        loader = f"TensorRT {job.facts['tensorrt']} on {job.facts['gpu']['name']}"
        return Verification(loader, _compared(job.facts["changed"]), metrics)

    def _verify_bundle(self, job: Job) -> Verification:
        expected = expected_probe(job)
        save_expected(expected, job.folder)
        recorded = read_build(job.folder)
        proof = prove_bundle(job.source, job.folder, expected, recorded)
        write_build(job.folder, recorded)  # once more, with the hash of the probe
        checked = f"{recorded.rules} rules of TensorRT's documentation hold"
        if proof.metrics:
            checked += f"; {_compared(recorded.changed)}"
        notes = ["no engine was built, so nothing ran on TensorRT", *proof.notes]
        loader = proof.loader or "the rule checker and ONNX's checker"
        return Verification(loader, checked, {"rules": recorded.rules, **proof.metrics}, notes)

    def usage(self, job: Job, folder: str) -> list[str]:
        if not job.facts["engine"]:
            return [
                "# No engine was built here. On the machine that is to run it:",
                f"#   {finishing(folder)}",
                f"import runtime; model = runtime.load({json.dumps(f'{folder}-engine')})",
            ]
        load = f"model = runtime.load({json.dumps(folder)})"
        return ["import runtime", load, 'print(model.generate("Once", max_new_tokens=32))']


def _compared(changed: bool) -> str:
    if changed:
        return (
            "logits and greedy tokens of texts that the artifact writes with the same weights rounded anew and the same inputs left "
            "unrounded (how far that is from the artifact: `kl_of_change`)"
        )
    return "logits and greedy tokens of texts that the artifact wrote"


def _write_onnx(job: Job, folder: Path) -> Build:
    """Write the ONNX file into `folder`; what `build.json` says of it, without profiles and hashes.

    Raises:
        RequestError: the artifact cannot be said in the dialect. CompressError: the file breaks a rule of TensorRT's or ONNX's.
    """
    source, options = job.source, job.options
    name = options.dtype or dtype_name(source.dtype)
    if name not in TYPES:
        raise RequestError(f"the artifact computes in {name}; choose one of {', '.join(TYPES)} with option dtype")
    facts = write_graphs(
        replace(job, source=expressible(source), folder=folder), dialect("tensorrt", getattr(torch, name))
    )
    model = read_model(source)
    odd = next((c for c in facts["cache"] if c != [model.kv_heads, model.head_dim]), None)
    if odd is not None or facts["layers"] != model.layers:
        raise RequestError(f"{source.path} has layers with caches of different shapes ({odd})")
    # Checked here and not in the proof: an engine built at once, and a bundle without proof, are read by TensorRT just the same.
    return Build(
        schema_version=2,
        options=options,
        dtype=TYPES[name],  # type: ignore[arg-type]
        sparse=sparse_modules(job),
        artifact=source.describe(),
        conversions=conversions(source, options),
        losses=job.losses,
        changed=bool(job.losses or dropped_activations(source)),
        rounds_inputs=rounds_inputs(source),
        rules=_check_model(folder / ONNX),
        model=model,
        limits=limits(options, model),
    )


def _check_model(path: Path) -> int:
    """The rules and ONNX's checker over an ONNX file; returns how many rules held.

    Raises:
        CompressError: a rule is broken, or the file is no valid ONNX.
    """
    import onnx

    from export.tensorrt.rules import RULES, check

    broken = check(path)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise CompressError(f"TensorRT would refuse {path.name}: {broken[0].sentence()}{more}")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise CompressError(f"{path.name} is not valid ONNX: {str(error).splitlines()[0]}") from error
    return len(RULES)


def _bytes_needed(source: Source, dtype: str | None) -> int:
    """Bytes of the ONNX file and of what lies beside it for a while: its float32 twin, or the plan."""
    width = 4 if (dtype or dtype_name(source.dtype)) == "float32" else 2
    codes, dense = 0.0, 0
    for name, (rows, columns) in source.shapes.items():
        entry = source.entries.get(name)
        weights = None if entry is None or name in source.embeddings else entry.scheme.grid
        if weights is None:
            dense += rows * columns
        else:
            codes += rows * columns * (1 if weights.bits > 4 else 0.6)  # with a scale for every 64
    onnx = max(source.bytes, int(codes + dense * width))
    return int((onnx + max(onnx, codes + dense * 4)) * 1.1) + (64 << 20)
