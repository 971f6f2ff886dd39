"""The TensorRT target: an engine where TensorRT and a GPU are, the build bundle everywhere else."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from export.folder import copy_tokenizer
from export.source import TOKENIZER_FILES, Source
from export.target import Conversion, Job, Target, Verification
from export.tensorrt import machine
from export.tensorrt.build import PLAN, Request, build_engine
from export.tensorrt.bundle import BUILD, DATA, ONNX, Bundle, is_bundle, write_build
from export.tensorrt.fits import conversions, drops_activations, expressible, reason_against
from export.tensorrt.model import DecoderModel, read_model
from export.tensorrt.native import norm_names
from export.tensorrt.options import TensorrtOptions
from export.tensorrt.profiles import Limits, limits
from export.tensorrt.prove import NoKernelError, OnnxRuntime, check_model, compare, load_probe, save_probe
from export.tensorrt.weights import OnnxWeights
from export.verify import Probe, probe
from runtime.errors import CompressError, RequestError

#: torch name -> TensorRT's `DataType` member.
TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}
_KEPT = (*TOKENIZER_FILES, "generation_config.json", "config.json")


class TensorrtTarget(Target):
    name: ClassVar[str] = "tensorrt"
    summary: ClassVar[str] = "A TensorRT engine; without TensorRT or a GPU the bundle that it is built from."
    extra: ClassVar[str | None] = "tensorrt"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript")
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
        # ONNX file and plan lie there at the same time; in the plan, and in what is dense here, every layer may be 16 bits wide.
        if isinstance(source, Bundle):
            return source.bytes * 2 + (64 << 20)
        dense = sum(rows * columns for rows, columns in source.shapes.values()) * 2
        return int(max(source.bytes, dense) * 2.2) + (64 << 20)

    # ---------------------------------------------------------------- writing
    def write(self, job: Job) -> None:
        options: TensorrtOptions = job.options
        reason = machine.missing()
        finishing = isinstance(job.source, Bundle)
        if reason is not None and (options.require_engine or finishing):
            raise RequestError(
                f"no engine can be built here: {reason}; run this on a machine with TensorRT and the GPU that is to run it"
            )
        if options.bundle and options.require_engine:
            raise RequestError("options bundle and require_engine exclude each other")
        if isinstance(job.source, Bundle):
            job.losses.update(job.source.build.get("losses", {}))
            self._engine(job, job.source.path, job.source.model, limits(options, job.source.model), job.source.build)
            for name in _KEPT:
                if (job.source.path / name).is_file():
                    (job.folder / name).write_bytes((job.source.path / name).read_bytes())
            return
        model = read_model(job.source)
        size = limits(options, model)
        _copy_texts(job)
        if reason is not None or options.bundle:
            content = self._onnx(job, job.folder)
            write_build(job.folder, content, model, size)
            self._say_bundle(job, reason or "option bundle asks for the bundle only")
            return
        # The plan goes where the export goes; the ONNX file lies beside it only while it is needed.
        with tempfile.TemporaryDirectory(dir=job.folder.parent, prefix=f"{job.folder.name}.onnx") as beside:
            content = self._onnx(job, Path(beside))
            self._engine(job, Path(beside), model, size, content)

    def _onnx(self, job: Job, folder: Path) -> dict[str, Any]:
        """Write the ONNX file into `folder`; what `build.json` says besides model, limits and hashes."""
        import torch

        from export.onnx.dialect import dialect
        from export.onnx.write import write_decoder

        name = job.options.dtype or str(job.source.dtype).removeprefix("torch.")
        if name not in TYPES:
            raise RequestError(
                f"the artifact computes in {name}, and TensorRT in {', '.join(TYPES)}; choose one with option dtype"
            )
        written = replace(job, source=expressible(job.source), folder=folder)
        facts = write_decoder(written, dialect("tensorrt", getattr(torch, name)))
        model = read_model(job.source)
        odd = next((c for c in facts["cache"] if c != [model.kv_heads, model.head_dim]), None)
        if odd is not None or facts["layers"] != model.layers:
            raise RequestError(
                f"{job.source.path} has layers with caches of different shapes ({odd}), which no profile is made for"
            )
        import onnx

        properties = onnx.load(str(folder / ONNX), load_external_data=False).metadata_props
        sparse = next((p.value for p in properties if p.key == "compress.sparse"), "[]")
        return {
            "options": job.options.model_dump(mode="json", exclude_unset=True),
            "dtype": TYPES[name],
            "sparse": json.loads(sparse),
            "aliases": _aliases(job, folder / ONNX, getattr(torch, name)),
            "artifact": job.source.describe(),
            "conversions": [asdict(c) for c in conversions(job.source, job.options)],
            "losses": job.losses,
            "changed": bool(job.losses) or drops_activations(job.source),
        }

    def _say_bundle(self, job: Job, reason: str) -> None:
        command = f"compress export {job.output} --target tensorrt --output {job.output}-engine"
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
        request = Request(
            source / ONNX,
            job.folder,
            model,
            size,
            content["dtype"],
            tuple(content["sparse"]),
            content["aliases"],
            job.options,
        )
        found = build_engine(machine.api(), request, job.progress)
        if found["constants"] == ONNX:  # a stripped plan from the parser takes its weights from the ONNX file again
            for name in (ONNX, DATA):
                if (source / name).is_file():
                    (job.folder / name).write_bytes((source / name).read_bytes())
        job.facts |= {
            **found,
            "engine": True,
            "dtype": content["dtype"],
            "changed": content["changed"],
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
        kept = load_probe(job.source.path) if isinstance(job.source, Bundle) else probe(job)
        if kept is None:
            raise CompressError(
                f"{job.source.path} was written with --no-verify and has nothing to compare with; add --no-verify here too"
            )
        return self._verify_engine(job, kept)

    def _verify_engine(self, job: Job, expected: Probe) -> Verification:
        import torch

        from runtime.engines.tensorrt import load_tensorrt
        from runtime.model import Model

        engine = load_tensorrt(_Written(job.folder, job.facts), torch.device("cuda"), {})
        model = Model(engine, None, _Written(job.folder, job.facts), frozenset())  # type: ignore[arg-type]

        def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
            return model.generate(prompts, max_new_tokens=count, ignore_eos=True)

        metrics = compare(expected, model.logits, generate, job.facts["dtype"], job.facts["changed"])
        return Verification(
            f"TensorRT {job.facts['tensorrt']} on {job.facts['gpu']['name']}", _compared(job.facts["changed"]), metrics
        )

    def _verify_bundle(self, job: Job) -> Verification:
        rules = check_model(job.folder / ONNX)
        content = json.loads((job.folder / BUILD).read_text(encoding="utf-8"))
        expected = probe(job)
        save_probe(expected, job.folder)
        model = read_model(job.source)
        notes = ["no engine was built, so nothing ran on TensorRT"]
        metrics: dict[str, Any] = {"rules": rules}
        loader, checked = "the rule checker and ONNX's checker", f"{rules} rules of TensorRT's documentation hold"
        try:
            session = OnnxRuntime(job.folder / ONNX)
            metrics |= compare(expected, session.logits, session.generate, content["dtype"], content["changed"])
            loader, checked = f"ONNX Runtime {session.version}", f"{checked}; {_compared(content['changed'])}"
        except NoKernelError as error:
            notes.append(f"tokens were not compared: ONNX Runtime has no kernel here ({error})")
        keys = ("options", "dtype", "sparse", "aliases", "artifact", "conversions", "losses", "changed")
        write_build(job.folder, {key: content[key] for key in keys}, model, limits(job.options, model))
        return Verification(loader, checked, metrics, notes)

    def usage(self, job: Job, folder: str) -> list[str]:
        if not job.facts["engine"]:
            return [
                "# No engine was built here. On the machine that is to run it:",
                f"#   compress export {folder} --target tensorrt --output {folder}-engine",
                f'import runtime; model = runtime.load("{folder}-engine")',
            ]
        return [
            "import runtime",
            f'model = runtime.load("{folder}")',
            'print(model.generate("Once", max_new_tokens=32))',
        ]


@dataclass(frozen=True)
class _Written:
    """An export before it has its `export.json`."""

    path: Path
    facts: dict[str, Any]


def _compared(changed: bool) -> str:
    if changed:
        return "logits of texts that the artifact wrote (weights or activations are not the artifact's own, so tokens may differ)"
    return "logits and greedy tokens of texts that the artifact wrote"


def _aliases(job: Job, path: Path, dtype: Any) -> dict[str, str]:
    """Which initializers stand for the norms whose weights tracing merged with equal ones."""
    import torch

    model = read_model(job.source)
    if model.unknown is not None:
        return {}
    values = {name: job.source.dense(name).to(dtype).contiguous() for name in norm_names(model)}
    wanted = {name: value.view(torch.uint8).numpy().tobytes() for name, value in values.items()}
    return OnnxWeights(path).add_aliases(wanted)


def _copy_texts(job: Job) -> None:
    """Tokenizer, generation config, and config.json without the description of how the artifact's weights lie."""
    copy_tokenizer(job.source.path, job.folder)
    config = {key: value for key, value in job.source.artifact.config.items() if key != "quantization_config"}
    (job.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


__all__ = ["BUILD", "PLAN", "TensorrtTarget"]
