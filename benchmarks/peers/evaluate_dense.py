"""The one evaluator: held-out perplexity of a dense checkpoint, its distance from the original, and what its weights really are.
Prints one JSON object.

    python evaluate_dense.py --model DENSE --ids ids.json [--original CHECKPOINT] [--group-size 128] [--scheme NVFP4 --compressed OUTPUT]

Weights are loaded as they are stored (bfloat16) and computed with in float32, so that nothing but the weights differs
between two checkpoints. Inputs of layers are rounded by compressed-tensors where the scheme says so, with the global scales
that the tool has calibrated and stored in OUTPUT. Every token of a window but the first is scored.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

BATCH = 16


@torch.inference_mode()
def quality(model: torch.nn.Module, original: torch.nn.Module | None, windows: torch.Tensor) -> dict[str, float | int]:
    """Perplexity over `windows` [n, length], the number of scored tokens and, with an original, its mean KL divergence to the model
    in nats and how often both prefer the same token."""
    loss = kl = 0.0
    count = same = 0
    for rows in windows.split(BATCH):
        logits = model(rows).logits[:, :-1].float().flatten(0, 1).log_softmax(-1)
        loss += float(torch.nn.functional.nll_loss(logits, rows[:, 1:].flatten(), reduction="sum"))
        count += rows[:, 1:].numel()
        if original is not None:
            wanted = original(rows).logits[:, :-1].float().flatten(0, 1).log_softmax(-1)
            kl += float(torch.nn.functional.kl_div(logits, wanted, reduction="sum", log_target=True))
            same += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
    facts: dict[str, float | int] = {"perplexity": math.exp(loss / count), "scored_tokens": count}
    return facts if original is None else {**facts, "kl": kl / count, "top1_agreement": same / count}


def round_inputs(model: torch.nn.Module, scheme: str, compressed: Path) -> None:
    """Let compressed-tensors round what every linear layer of the decoder reads, if the preset scheme says so."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    arguments = preset_name_to_scheme(scheme, ["Linear"]).input_activations
    if arguments is None:
        return
    calibrated: dict[str, torch.Tensor] = {}
    for file in compressed.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            names = [name for name in handle.keys() if name.endswith(".input_global_scale")]  # noqa: SIM118
            calibrated |= {name.rpartition(".")[0]: handle.get_tensor(name) for name in names}

    def hook(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], tuple[torch.Tensor]]:
        common = calibrated[name] if arguments.dynamic == "local" else None

        def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            scale, zero = compute_dynamic_scales_and_zp(inputs[0], arguments, module, common)
            return (fake_quantize(inputs[0], scale, zero, arguments, common),)

        return rounded

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            module.register_forward_pre_hook(hook(name))


def weight_facts(model: torch.nn.Module, group_size: int | None) -> dict[str, float | int | bool]:
    """Checks on the linear layers of the decoder, so that no tool wins by not doing what was asked.

    Returns:
        zeros: share of weights that are zero; holds_2_4: at most two non-zeros in each four; levels: the largest number
        of different values in any group of `group_size` columns of a row (-1: the whole row; absent when None).
    """
    zeros = total = levels = 0
    holds = True
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name.endswith("lm_head"):
            continue
        weight = module.weight.detach()
        zeros += int((weight == 0).sum())
        total += weight.numel()
        holds &= bool(((weight.reshape(weight.shape[0], -1, 4) != 0).sum(-1) <= 2).all())
        if group_size is not None:
            size = weight.shape[1] if group_size == -1 else group_size
            for part in weight.split(size, dim=1):
                ordered = part.sort(dim=1).values
                levels = max(levels, int((ordered.diff(dim=1) != 0).sum(1).max()) + 1)
    facts: dict[str, float | int | bool] = {"zeros": round(zeros / total, 4), "holds_2_4": holds}
    return facts if group_size is None else {**facts, "levels": levels}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ids", type=Path, required=True)
    parser.add_argument("--original", help="the checkpoint before compression")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--scheme", help="preset of compressed-tensors that the model was compressed with")
    parser.add_argument("--compressed", type=Path, help="what the tool wrote")
    arguments = parser.parse_args()
    windows = torch.tensor(json.loads(arguments.ids.read_text())["heldout"])
    model, original = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() if path else None
        for path in (arguments.model, arguments.original)
    )
    if arguments.scheme:
        round_inputs(model, arguments.scheme, arguments.compressed)
    print(json.dumps({**quality(model, original, windows), **weight_facts(model, arguments.group_size)}))


if __name__ == "__main__":
    main()
