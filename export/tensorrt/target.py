"""TensorRT target: an engine where TensorRT and a GPU are, the build bundle everywhere else."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from export.folder import copy_tokenizer
from export.onnx.change import Expected
from export.source import TOKENIZER_FILES, Source
from export.target import Conversion, Job, Target, Verification
from export.tensorrt import machine
from export.tensorrt.build import PLAN, Request, build_engine
from export.tensorrt.bundle import BUILD, CONTENT, DATA, ONNX, Bundle, is_bundle, write_build
from export.tensorrt.model import DecoderModel, read_model
from export.tensorrt.onnx_file import bytes_needed, write_onnx
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.probe_file import load_expected, save_expected
from export.tensorrt.profiles import Limits, limits
from export.tensorrt.proof import LIMITS, Unfinished, compare, expect, precision, prove_bundle
from export.tensorrt.support import conversions, reason_against
from runtime.engines.tensorrt.engine import finishing
from runtime.errors import CompressError, RequestError

_KEPT = (*TOKENIZER_FILES, "generation_config.json", "config.json")


class TensorrtTarget(Target):
    name: ClassVar[str] = "tensorrt"
    summary: ClassVar[str] = "A TensorRT engine; without TensorRT or a GPU the bundle that it is built from."
    extra: ClassVar[str | None] = "tensorrt"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnx_ir")
    options = TensorrtOptions

    def open(self, path: str | Path, trust_remote_code: bool) -> Any:
        """A bundle to finish, or an artifact."""
        return Bundle(Path(path)) if is_bundle(Path(path)) else super().open(path, trust_remote_code)

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
        return source.conversions if isinstance(source, Bundle) else conversions(source, options)

    def bytes_needed(self, source: Source | Bundle, options: Any) -> int:
        # ONNX file and plan lie there at the same time.
        if isinstance(source, Bundle):
            return source.bytes * 2 + (64 << 20)
        return bytes_needed(source, options.dtype)

    # ---------------------------------------------------------------- writing
    def write(self, job: Job) -> None:
        options: TensorrtOptions = job.options
        if options.bundle and options.require_engine:
            raise RequestError("options bundle and require_engine exclude each other")
        reason = machine.missing()
        finishing = isinstance(job.source, Bundle)
        if reason is not None and (options.require_engine or finishing):
            raise RequestError(
                f"no engine can be built here: {reason}; run this on a machine with TensorRT and the GPU that is to run it"
            )
        if isinstance(job.source, Bundle):
            job.losses.update(job.source.entries.losses)
            self._engine(job, job.source.path, job.source.model, limits(options, job.source.model), job.source.build)
            for name in _KEPT:
                if (job.source.path / name).is_file():
                    shutil.copyfile(job.source.path / name, job.folder / name)
            return
        model = read_model(job.source)
        size = limits(options, model)
        _copy_texts(job)
        if reason is not None or options.bundle:
            content = write_onnx(job, job.folder)
            write_build(job.folder, content, model, size)
            self._say_bundle(job, reason or "option bundle asks for the bundle only")
            return
        # The plan goes where the export goes; the ONNX file lies beside it only while it is needed.
        with tempfile.TemporaryDirectory(dir=job.folder.parent, prefix=f"{job.folder.name}.onnx") as beside:
            content = write_onnx(job, Path(beside))
            self._engine(job, Path(beside), model, size, content)

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

    def _engine(self, job: Job, source: Path, model: DecoderModel, size: Limits, content: dict[str, Any]) -> None:
        """Build the plan from the ONNX file in `source`."""
        gpu = machine.gpu()
        assert gpu is not None
        if job.options.network == "native":
            job.progress.warn(
                "network=native is built by TensorRT's ONNX parser: NVIDIA's attention layer with key_value_lengths failed or computed "
                "garbage on some releases and GPUs"
            )
        request = Request(
            source / ONNX,
            job.folder,
            model,
            size,
            content["dtype"],
            bool(content["sparse"]),
            job.options,
        )
        found = build_engine(machine.api(), request, job.progress)
        if found["constants"]:  # a stripped plan takes its weights from the ONNX file again
            for name in (ONNX, DATA):
                if (source / name).is_file():
                    shutil.copyfile(source / name, job.folder / name)
        job.facts |= {
            **found,
            "engine": True,
            "dtype": content["dtype"],
            "changed": content["changed"],
            "rounds_inputs": content["rounds_inputs"],
            "gpu": gpu.as_dict(),
            "limits": asdict(size),
            "layers": model.layers,
            "network_layers": found["layers"],
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "vocabulary": model.vocabulary,
            "context": model.context,
            "say": [
                f"The engine runs on {gpu.name} (compute capability {gpu.compute_capability}) with TensorRT {found['tensorrt']}."
            ],
        }

    # ---------------------------------------------------------------- proof
    def verify(self, job: Job) -> Verification:
        if not job.facts["engine"]:
            return self._verify_bundle(job)
        expected = load_expected(job.source.path) if isinstance(job.source, Bundle) else expect(job)
        if expected is None:
            raise CompressError(
                f"{job.source.path} was written with --no-verify and has nothing to compare with; add --no-verify here too"
            )
        return self._verify_engine(job, expected)

    def _verify_engine(self, job: Job, expected: Expected) -> Verification:
        import torch

        from runtime.engines.tensorrt.engine import load_tensorrt

        export: Any = Unfinished(job.folder, job.facts)
        limits = LIMITS[job.facts["dtype"], job.facts["rounds_inputs"]]
        metrics = compare(expected, load_tensorrt(export, torch.device("cuda"), {}), export, limits)
        return Verification(
            f"TensorRT {job.facts['tensorrt']} on {job.facts['gpu']['name']}", _compared(job.facts["changed"]), metrics
        )

    def _verify_bundle(self, job: Job) -> Verification:
        expected = expect(job)
        save_expected(expected, job.folder)
        content = json.loads((job.folder / BUILD).read_text(encoding="utf-8"))
        proof = prove_bundle(job.folder, expected, precision(job.source, content["dtype"]))
        # Once more, with the hash of what the machine that finishes it compares with.
        model = read_model(job.source)
        write_build(job.folder, {key: content[key] for key in CONTENT}, model, limits(job.options, model))
        checked = f"{content['rules']} rules of TensorRT's documentation hold"
        notes = ["no engine was built, so nothing ran on TensorRT", *proof.notes]
        metrics = {"rules": content["rules"], **proof.metrics}
        if not proof.metrics:
            return Verification("the rule checker and ONNX's checker", checked, metrics, notes)
        return Verification(proof.loader, f"{checked}; {_compared(content['changed'])}", metrics, notes)

    def usage(self, job: Job, folder: str) -> list[str]:
        if not job.facts["engine"]:
            return [
                "# No engine was built here. On the machine that is to run it:",
                f"#   {finishing(folder)}",
                f"import runtime; model = runtime.load({json.dumps(f'{folder}-engine')})",
            ]
        return [
            "import runtime",
            f"model = runtime.load({json.dumps(folder)})",
            'print(model.generate("Once", max_new_tokens=32))',
        ]


def _compared(changed: bool) -> str:
    if changed:
        return (
            "logits and greedy tokens of texts that the artifact writes with the same weights rounded anew and the same inputs left "
            "unrounded (how far that is from the artifact: `kl_of_change`)"
        )
    return "logits and greedy tokens of texts that the artifact wrote"


def _copy_texts(job: Job) -> None:
    """Tokenizer, generation config, and config.json without the description of how the artifact's weights lie."""
    copy_tokenizer(job.source.path, job.folder)
    config = {key: value for key, value in job.source.artifact.config.items() if key != "quantization_config"}
    (job.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


__all__ = ["BUILD", "PLAN", "TensorrtTarget"]
