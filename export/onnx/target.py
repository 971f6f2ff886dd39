"""ONNX target: a model with its cache as one graph, weights compressed, for ONNX Runtime and other readers of ONNX."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

from export.folder import copy_files, write_json
from export.onnx.conversions import changes, has_static_int8
from export.onnx_graph.dialect import OnnxOptions, dialect_of, fast_name
from export.onnx_graph.grid import ONNX, why_not
from export.source import Source
from export.target import Conversion, Job, Options, Target, Verification, merged
from runtime.modeling.skeleton import is_speech

# sentence-transformers' files, which say how an encoder's states become an embedding.
_POOLING_FILES = ("modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "[0-9]*_*/config.json")


class OnnxTarget(Target):
    """ONNX, opset 21: int4/int8 DequantizeLinear `[K, N]` in blocks, which ONNX Runtime fuses into its products."""

    name: ClassVar[str] = "onnx"
    summary = "ONNX with its KV cache, weights compressed in the graph; runs in ONNX Runtime and in runtime.load()."
    extra: ClassVar[str | None] = "onnx"
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnx_ir", "onnxruntime")
    options: ClassVar[type[Options]] = OnnxOptions
    transforms_inputs: ClassVar[bool] = True

    def why_not(self, source: Source, options: Any) -> str | None:
        if is_speech(source.config):
            return "it hears, and encoders are traced that read token ids"
        if source.compressed_expert is not None:
            return f"{source.compressed_expert} is a routed expert's, and a graph does not choose experts token by token yet"
        for name, entry in source.entries.items():
            acts, grid = entry.scheme.activations, entry.scheme.grid
            if acts is not None and acts.type == "float" and not acts.symmetric:
                return f"{name} has fp8 activations with a zero point, which no ONNX operator computes"
            if acts is not None and acts.group_size is not None:
                return f"{name} rounds its inputs in groups of {acts.group_size}, which no ONNX operator does"
            if acts is not None and acts.outliers is not None:
                text = "which no ONNX operator does; compress with W8A8-INT8 instead"
                return f"{name} keeps inputs above {acts.outliers:g} unrounded (LLM.int8), {text}"
            reason = None if grid is None or options.requantize else why_not(grid, source.shapes[name], ONNX)
            if reason is not None:
                return f"{name} has {reason}"
        return None

    def conversions(self, source: Source, options: Any) -> list[Conversion]:
        return merged(changes(source, dialect_of(options)))

    def bytes_needed(self, source: Source, options: Any) -> int:
        return int(2.5 * sum(rows * columns for rows, columns in source.shapes.values())) + source.bytes + (16 << 20)

    def write(self, job: Job) -> None:
        from export.onnx_graph.write import write_graphs

        spoken = dialect_of(job.options)
        job.facts |= write_graphs(job, spoken)
        if spoken.name == "onnx" and any(has_static_int8(entry.scheme) for entry in job.source.entries.values()):
            # Without it products of int8 saturate on x86 CPUs that have no VNNI, and the result is wrong without a word.
            job.facts["session"] = {"session.x64quantprecision": "1"}
        if job.options.ort:
            for file in sorted(job.folder.glob("*.onnx")):
                write_fast(file)
        write_config(job.source, job.folder)

    def verify(self, job: Job) -> Verification:
        from export.onnx.proof import prove

        return prove(job, products(job))

    def usage(self, job: Job, folder: str) -> list[str]:
        ask = {
            ("encoder", True): 'model.embed(["A text.", "Another one."])',
            ("encoder", False): "model.hidden_states([[1, 2, 3]])",
            ("decoder", True): 'model.generate("Once upon a time", max_new_tokens=32)',
            ("decoder", False): "model.generate([1, 2, 3], max_new_tokens=32)",
        }[job.facts["kind"].removeprefix("encoder-"), (job.folder / "tokenizer.json").is_file()]
        hint = '  # kernels="fast" rounds activations to int8' if any(products(job).values()) else ""
        return ["import runtime", f'model = runtime.load("{folder}"){hint}', f"print({ask})"]


def products(job: Job) -> dict[str, int]:
    """{file: products with compressed weights in it}."""
    found = job.facts["compressed"]
    return found if isinstance(found, dict) else {"model.onnx": found}


def write_fast(path: Path) -> None:
    """A second, small graph over the same data file: products may round activations to int8 (`kernels="fast"`).

    None is written where it would be the same graph.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    for level in (a for node in nodes for a in node.attribute if a.name == "accuracy_level"):
        level.i = 4
    if nodes:
        onnx.save(model, str(path.with_name(fast_name(path.name))))


def write_config(source: Source, folder: Path) -> None:
    """config.json without the artifact's quantization_config, the tokenizer, and how an encoder's states are pooled."""
    config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    write_json(folder / "config.json", config)
    copy_files(source.path, folder)
    for pattern in _POOLING_FILES:
        for file in source.path.glob(pattern):
            place = folder / file.relative_to(source.path)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)
