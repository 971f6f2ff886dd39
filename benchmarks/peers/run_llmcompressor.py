"""Compress a checkpoint with llm-compressor, or decompress what it wrote. Runs in llm-compressor's own environment.

python run_llmcompressor.py --config cell.json            compress (this is what is timed)
python run_llmcompressor.py --config cell.json --export   its output as a dense bfloat16 checkpoint
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from dense_checkpoint import Phases, read_calibration, run, write_dense, write_report


def modifiers(config: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    """The modifiers of a cell. What `settings` does not name stays at llm-compressor's default."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    result: list[Any] = []
    if prune := config.get("prune"):
        kind = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}[prune["method"]]
        pattern = {} if prune["pattern"] == "unstructured" else {"mask_structure": prune["pattern"]}
        result.append(kind(sparsity=prune["sparsity"], ignore=["re:.*lm_head"], **pattern))
    if quantize := config.get("quantize"):
        group: dict[str, Any] = {"targets": ["Linear"]}
        if "scheme" in quantize:
            preset = preset_name_to_scheme(quantize["scheme"], ["Linear"])
            weights = preset.weights.model_dump()
            group |= {} if preset.input_activations is None else {"input_activations": preset.input_activations}
        else:
            size = quantize["group_size"]
            weights = {
                "num_bits": quantize["bits"],
                "type": "int",
                "symmetric": quantize["symmetric"],
                "strategy": "channel" if size == -1 else "group",
                **({} if size == -1 else {"group_size": size}),
            }
        weights |= {"observer": settings["observer"]} if "observer" in settings else {}
        groups = {"group_0": group | {"weights": weights}}
        method = settings.get("quantize_method", quantize["method"])
        if method == "gptq":
            result.append(GPTQModifier(config_groups=groups, ignore=["lm_head"]))
        else:
            if method == "awq":
                extra = {"duo_scaling": settings["duo_scaling"]} if "duo_scaling" in settings else {}
                result.append(AWQModifier(**extra))
            result.append(QuantizationModifier(config_groups=groups, ignore=["lm_head"]))
    return result


def compress(config: dict[str, Any], phases: Phases) -> None:
    """Run one cell and save it in llm-compressor's own format."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM

    phases.done("import")
    notes: list[str] = []
    if (config.get("quantize") or {}).get("method") == "awq":
        # 0.14.0.1 pins host memory even when there is no accelerator to pin it for, and torch refuses.
        IntermediatesCache.pin_memory = lambda *args, **kwargs: None
        notes.append(
            "IntermediatesCache.pin_memory was replaced by a no-op: AWQ fails without an accelerator otherwise"
        )
    rows = read_calibration(config["calibration"])
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    settings = config.get("settings", {})
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=config.get("dtype", "bfloat16"))
    phases.done("load")
    recipe = modifiers(config, settings)
    oneshot(
        model=model,
        tokenizer=config["model"],
        dataset=data,
        recipe=recipe,
        max_seq_length=len(rows[0]),
        num_calibration_samples=len(rows),
        **settings.get("oneshot", {}),
    )
    phases.done("compress")
    model.save_pretrained(config["output"], save_compressed=True)
    phases.done("save")
    versions = {
        name: importlib.metadata.version(name)
        for name in ("llmcompressor", "torch", "transformers", "compressed-tensors")
    }
    write_report(config["report"], phases, versions=versions, notes=notes, recipe=[str(part) for part in recipe])


def export(config: dict[str, Any]) -> None:
    """Decompress the saved model through transformers and write it dense."""
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    saved = json.loads((Path(config["output"]) / "config.json").read_text())
    extra: dict[str, Any] = {}
    if "quantization_config" in saved:
        extra["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(config["output"], dtype=config.get("dtype", "bfloat16"), **extra)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.named_parameters():
        if name.rsplit(".", 1)[-1] in ("weight", "bias"):
            if not value.is_floating_point():
                raise ValueError(f"{name}: still codes after decompression ({value.dtype})")
            tensors[name] = value.data
    write_dense(config["model"], tensors, config["dense"])


if __name__ == "__main__":
    run(__doc__, compress, export)
