"""Compress a checkpoint with GPTQModel, or decompress what it wrote. Runs in GPTQModel's own environment.

python run_gptqmodel.py --config cell.json            compress (this is what is timed)
python run_gptqmodel.py --config cell.json --export   its output as a dense bfloat16 checkpoint
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from dense_checkpoint import Phases, read_calibration, run, write_dense, write_report

# 7.6.0 starts (cores + 1) // 2 workers, and refuses to run with the one that this makes on a machine of two cores.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, ((os.cpu_count() or 1) + 1) // 2)))


def quantize_config(quantize: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The configuration of a cell. What `settings` does not name stays at GPTQModel's default."""
    from gptqmodel.quantization.config import FORMAT, METHOD, QuantizeConfig, SmoothMSE, WeightOnlyConfig

    extra = dict(settings.get("quantize_config", {}))
    if quantize["method"] == "rtn":
        smooth = SmoothMSE() if settings.get("smooth") == "mse" else None
        extra["weight_only"] = WeightOnlyConfig(method="rtn", smooth=smooth)
    elif quantize["method"] == "awq":
        extra |= {"method": METHOD.AWQ, "format": FORMAT.GEMM}
    if quantize["method"] == "gptq" and quantize["group_size"] == -1:
        extra.setdefault("act_group_aware", False)  # its default, True, is refused for channel-wise scales
    return QuantizeConfig(bits=quantize["bits"], group_size=quantize["group_size"], sym=quantize["symmetric"], **extra)


def compress(config: dict[str, Any], phases: Phases) -> None:
    """Run one cell and save it in GPTQModel's own format."""
    from gptqmodel import BACKEND, GPTQModel

    phases.done("import")
    settings = config.get("settings", {})
    rows = read_calibration(config["calibration"])
    chosen = quantize_config(config["quantize"], settings)
    model = GPTQModel.load(config["model"], chosen, device="cpu")
    phases.done("load")
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    method = config["quantize"]["method"]
    arguments = dict(settings.get("quantize", {}))
    if method == "awq":
        arguments["backend"] = BACKEND.AWQ_TORCH  # the automatic choice demands CUDA
    model.quantize(None if method == "rtn" else data, **arguments)
    phases.done("compress")
    model.save(config["output"])
    phases.done("save")
    notes = [f"GPTQMODEL_CPU_WORKERS={os.environ['GPTQMODEL_CPU_WORKERS']}: its own default fails on two cores"]
    versions = {name: importlib.metadata.version(name) for name in ("gptqmodel", "torch", "transformers")}
    write_report(config["report"], phases, versions=versions, notes=notes, recipe=str(chosen))


def export(config: dict[str, Any]) -> None:
    """Load the saved model with the plain torch kernel, take its dequantized weights, write it dense."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear.torch_awq import dequantize_gemm

    awq = config["quantize"]["method"] == "awq"
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    wrapped = GPTQModel.load(config["output"], device="cpu", backend=backend)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in wrapped.model.named_modules():
        if hasattr(module, "qweight"):
            if awq:
                packed = (module.qweight, module.qzeros, module.scales)
                weight = dequantize_gemm(*packed, bits=module.bits, group_size=module.group_size)
            else:
                weight = module.dequantize_weight()
            tensors[f"{name}.weight"] = weight.T[: module.out_features, : module.in_features]
            if getattr(module, "bias", None) is not None:
                tensors[f"{name}.bias"] = module.bias
        else:
            tensors |= {f"{name}.{key}": value.data for key, value in module.named_parameters(recurse=False)}
    write_dense(config["model"], tensors, config["dense"])


if __name__ == "__main__":
    run(__doc__, compress, export)
