"""`--target huggingface`: a checkpoint that vLLM, SGLang and transformers load without this package."""

from __future__ import annotations

import json
import shutil
from typing import Any, ClassVar, Literal

from export.folder import write_json
from export.huggingface import proof
from export.huggingface.compressed_tensors import CompressedTensors
from export.huggingface.gptq import Gptq
from export.huggingface.plan import Layout, Plan, bytes_after, changes, make_plan
from export.huggingface.shards import Part, stored_part, write
from export.source import Source, distance, in_float32
from export.target import Conversion, Job, Options, Target, Verification, merged
from runtime.checkpoint.companions import companions, left_behind
from runtime.formats import TensorSpec
from runtime.formats.block_float import BlockFloat
from runtime.formats.float8_block import Float8Block
from runtime.formats.grid import GridScheme
from runtime.modeling.layer_sizes import differing, is_ours
from runtime.modeling.skeleton import model_kind


class HuggingFaceOptions(Options):
    """Options of `--target huggingface`."""

    layout: Literal["auto", "compressed-tensors", "gptq"] = "auto"
    """compressed-tensors (the default) holds every scheme; gptq weight-only integers, for engines that know nothing newer."""

    keep_bits: bool = False
    """Leave 2, 3, 5, 6 and 7 bits as they are, for transformers; without it they widen (exactly) to the 4 and 8 that vLLM knows."""

    unify: bool = False
    """Store q/k/v or gate/up of different integer schemes in one that holds them all exactly; without it they are refused."""

    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    """gptq layout: zero points less one (gptq, what all readers know) or as they are (gptq_v2)."""


class HuggingFaceTarget(Target):
    """See the module."""

    name: ClassVar[str] = "huggingface"
    summary: ClassVar[str] = "A checkpoint for vLLM, SGLang and transformers (compressed-tensors or GPTQ layout)."
    packages: ClassVar[tuple[str, ...]] = ("compressed_tensors",)
    options: ClassVar[type[Options]] = HuggingFaceOptions
    representations: ClassVar[frozenset[str]] = frozenset({GridScheme.name, BlockFloat.name, Float8Block.name})

    def why_not(self, source: Source, options: HuggingFaceOptions) -> str | None:
        kind = model_kind(source.config)
        if kind != "decoder":
            return f"its architecture is an {kind}, and this target carries decoders"
        if is_ours(source.skeleton):
            differ = ", ".join(sorted(differing(source.config)))
            return f"its layers differ in {differ}, and transformers cannot build a {type(source.skeleton).__name__} so; runtime.load does"
        if source.compressed_expert is not None:
            return (
                f"{source.compressed_expert} is a routed expert's, which this target does not carry yet; where its quant_method is "
                "compressed-tensors, the artifact itself is what vLLM and transformers read"
            )
        if options.layout != "gptq" and options.checkpoint_format != "gptq":
            return "checkpoint_format is an option of layout=gptq"
        if options.layout == "gptq" and not source.entries:
            return "nothing in it is compressed, so there is nothing to store in the gptq layout"
        _, plan = _planned(source, options)
        if plan.problem is None and options.layout == "gptq" and not plan.entries:
            return "none of its layers is stored in integers, so there is nothing to store in the gptq layout"
        return plan.problem

    def conversions(self, source: Source, options: HuggingFaceOptions) -> list[Conversion]:
        layout, plan = _planned(source, options)
        return merged(changes(layout, source, plan)) + layout.remarks(source, plan, options)

    def bytes_needed(self, source: Source, options: HuggingFaceOptions) -> int:
        (layout, plan), checkpoint = _planned(source, options), source.artifact.checkpoint
        modules = sum(bytes_after(layout, source, plan, name) for name in (*plan.entries, *plan.dense))
        rest = sum(checkpoint.nbytes(name) for name in source.dense_names())
        return int((modules + rest) * 1.02) + (64 << 20)

    def write(self, job: Job) -> None:
        source, options = job.source, job.options
        layout, plan = _planned(source, options)
        parts = _parts(job, layout, plan)
        job.progress.phase(f"writing {len(parts)} tensors and layers", len(parts))
        write(job.folder, parts, job.progress.step)
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
        config.pop("quantization_config", None)
        if plan.entries:
            config["quantization_config"] = layout.config(source, plan, options)
        if options.layout == "gptq":
            config.pop("torch_dtype", None)
            config["dtype"] = "float16"
            write_json(job.folder / "quantize_config.json", config["quantization_config"])
        write_json(job.folder / "config.json", config)
        code = sorted(source.path.glob("*.py")) if "auto_map" in config else []
        for file in [*(file for file in companions(source.path) if file.parent == source.path), *code]:
            if not (job.folder / file.name).exists():
                shutil.copyfile(file, job.folder / file.name)
        for name, why in left_behind(source.path).items():
            job.progress.warn(f"{source.path / name} stays behind: {why}")
        job.facts |= {"layout": layout.name, "compressed_layers": len(plan.entries), "made_dense": list(plan.dense)}
        if options.layout == "gptq":
            job.facts["checkpoint_format"] = options.checkpoint_format

    def verify(self, job: Job) -> Verification:
        _, plan = _planned(job.source, job.options)
        if job.options.layout == "gptq":
            return proof.verify_gptq(job, plan)
        return proof.verify_compressed(job, plan)

    def usage(self, job: Job, folder: str) -> list[str]:
        needed = "gptqmodel optimum" if job.options.layout == "gptq" else "compressed-tensors"
        return [
            f"# pip install transformers {needed}",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model, tokenizer = AutoModelForCausalLM.from_pretrained("{folder}"), AutoTokenizer.from_pretrained("{folder}")',
            'print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=32)[0]))',
            f"# or: vllm serve {folder}",
        ]


def _planned(source: Source, options: HuggingFaceOptions) -> tuple[Layout, Plan]:
    layout = Gptq() if options.layout == "gptq" else CompressedTensors()
    return layout, make_plan(layout, source, options)


def _parts(job: Job, layout: Layout, plan: Plan) -> list[Part]:
    """Everything that is stored, in the artifact's order of names."""
    source = job.source
    found: dict[str, list[Part]] = {name: layout.parts(job, name, entry) for name, entry in plan.entries.items()}
    for name in plan.dense:
        found[name] = [_dense(job, name)]
    for name in source.dense_names():
        found.setdefault(name, []).append(stored_part(source, name))
    return [part for name in sorted(found) for part in found[name]]


def _dense(job: Job, module: str) -> Part:
    source, name = job.source, f"{module}.weight"

    def make() -> dict[str, Any]:
        weight = source.weight(module)
        matrix = weight.dequantize().to(source.dtype)
        if weight.scheme.grid is not None:
            job.losses[module] = distance(in_float32(weight), matrix.float())
        return {name: matrix}

    return Part({name: TensorSpec(source.shapes[module], source.dtype)}, make)
