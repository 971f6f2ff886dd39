"""TensorRT target: an engine where TensorRT and a GPU are, the build bundle everywhere else."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from export.folder import copy_tokenizer
from export.source import TOKENIZER_FILES, Source
from export.target import Conversion, Job, Target, Verification
from export.tensorrt import machine
from export.tensorrt.build import build_engine
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
from export.tensorrt.onnx_file import bytes_needed, write_onnx
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.profiles import limits, read_model
from export.tensorrt.proof import LIMITS, compare, expected_probe, precision, prove_bundle
from export.tensorrt.support import conversions, reason_against
from runtime.engines.tensorrt.engine import finishing
from runtime.errors import CompressError, RequestError


class TensorrtTarget(Target):
    """See the module."""

    name: ClassVar[str] = "tensorrt"
    summary: ClassVar[str] = "A TensorRT engine; without TensorRT or a GPU the bundle that it is built from."
    extra: ClassVar[str | None] = "tensorrt"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnx_ir")
    options = TensorrtOptions

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
        return source.bytes * 2 + (64 << 20) if isinstance(source, Bundle) else bytes_needed(source, options.dtype)

    # ---------------------------------------------------------------- writing
    def write(self, job: Job) -> None:
        source: Source | Bundle = job.source
        if job.options.bundle and job.options.require_engine:
            raise RequestError("options bundle and require_engine exclude each other")
        reason = machine.missing()
        if reason is not None and (job.options.require_engine or isinstance(source, Bundle)):
            raise RequestError(f"no engine can be built here: {reason}; run this where the engine is to run")
        if isinstance(source, Bundle):
            job.losses.update(source.build.losses)
            self._engine(job, source.path, source.build)
            for name in (*TOKENIZER_FILES, "generation_config.json", "config.json"):
                if (source.path / name).is_file():
                    shutil.copyfile(source.path / name, job.folder / name)
            return
        copy_tokenizer(source.path, job.folder)
        config = {key: value for key, value in source.artifact.config.items() if key != "quantization_config"}
        (job.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if reason is not None or job.options.bundle:
            write_build(job.folder, write_onnx(job, job.folder))
            self._say_bundle(job, reason or "option bundle asks for the bundle only")
            return
        # The plan goes where the export goes; the ONNX file lies beside it only while it is needed.
        with tempfile.TemporaryDirectory(dir=job.folder.parent, prefix=f"{job.folder.name}.onnx") as beside:
            self._engine(job, Path(beside), write_onnx(job, Path(beside)))

    def _say_bundle(self, job: Job, reason: str) -> None:
        command = finishing(str(job.output))
        job.facts |= {
            "engine": False,
            "reason": reason,
            "finish": command,
            "say": [
                f"No engine was built: {reason}. This is the build bundle.",
                f"To finish it, on a machine with TensorRT and the GPU that is to run the engine: {command}",
            ],
        }

    def _engine(self, job: Job, source: Path, build: Build) -> None:
        """Build the plan from the ONNX file in `source`."""
        gpu = machine.gpu()
        assert gpu is not None
        if job.options.network == "native":
            job.progress.warn(
                "network=native is built by TensorRT's ONNX parser: NVIDIA's attention layer with key_value_lengths failed or computed "
                "garbage on some releases and GPUs"
            )
        size = limits(job.options, build.model)
        found = build_engine(machine.api(), job, source, build, size)
        if found["constants"]:  # a stripped plan takes its weights from the ONNX file again
            for name in (ONNX, DATA):
                if (source / name).is_file():
                    shutil.copyfile(source / name, job.folder / name)
        where = f"{gpu['name']} (compute capability {gpu['compute_capability']}) with TensorRT {found['tensorrt']}"
        job.facts |= {
            **found,
            "engine": True,
            "dtype": build.dtype,
            "changed": build.changed,
            "rounds_inputs": build.rounds_inputs,
            "gpu": gpu,
            "limits": asdict(size),
            "network_layers": found["layers"],
            **asdict(build.model),
            "say": [f"The engine runs on {where}."],
        }

    # ---------------------------------------------------------------- proof
    def verify(self, job: Job) -> Verification:
        if not job.facts["engine"]:
            return self._verify_bundle(job)
        expected = load_expected(job.source.path) if isinstance(job.source, Bundle) else expected_probe(job)
        if expected is None:
            raise CompressError(f"{job.source.path} was written without proof; finish it with --no-verify too")
        import torch

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
        build = read_build(job.folder)
        proof = prove_bundle(job.folder, expected, precision(job.source, build.dtype))
        write_build(job.folder, build)  # once more, with the hash of the probe
        checked = f"{build.rules} rules of TensorRT's documentation hold"
        if proof.metrics:
            checked += f"; {_compared(build.changed)}"
        notes = ["no engine was built, so nothing ran on TensorRT", *proof.notes]
        loader = proof.loader or "the rule checker and ONNX's checker"
        return Verification(loader, checked, {"rules": build.rules, **proof.metrics}, notes)

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
