"""gpt-fast on the shape of section `llama`: compiled decode steps in bfloat16, and with its int4 weights. Needs a checkout of it.

Its models get random weights; a step is a forward pass and an argmax, compiled as its `generate.py` does.
"""

from __future__ import annotations

import importlib
import inspect
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpu_sections.bench import Bench, MissingPeerError, Row
from gpu_sections.llama import GROUP, SHAPES, STEPS, chosen_shape, decode_cells


def timing(bench: Bench) -> None:
    """Decode steps at the batches and depths of ours, one at a time: each compiles anew."""
    if bench.gpt_fast is None:
        raise MissingPeerError("gpt-fast has no package; --gpt-fast CHECKOUT names one")
    if not (bench.gpt_fast / "model.py").is_file():
        raise MissingPeerError(f"{bench.gpt_fast} has no model.py of gpt-fast")
    sys.path.insert(0, str(bench.gpt_fast))
    shape = SHAPES[chosen_shape(bench)]
    for weights in ("bf16", "w4"):
        model = None
        for batch, depth in decode_cells(bench):
            if bench.enough(f"gpt-fast {weights}, batch {batch}, depth {depth}", bench.pick(30, 1)):
                row: Row = {"engine": f"gpt-fast {weights}", "batch": batch, "depth": depth}
                model = model or bench.of_peer(row, "model", lambda w=weights: built(bench, shape, w == "w4"))
                if model is None:
                    bench.add(row)
                    break
                bench.peer(row, "step_ms", lambda b=batch, d=depth, m=model: step_ms(bench, m, b, d))
                bench.add(row)
        del model
        bench.recover()


def built(bench: Bench, shape: dict[str, int], packed: bool) -> Any:
    """Its model with random weights."""
    source = importlib.import_module("model")
    arguments = source.ModelArgs(
        block_size=shape["max_position_embeddings"], vocab_size=shape["vocab_size"], n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"], n_local_heads=shape["num_key_value_heads"], dim=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
    )  # fmt: skip
    with torch.device(bench.device):
        model = source.Transformer(arguments).to(torch.bfloat16).eval()
        if packed:
            model = importlib.import_module("quantize").WeightOnlyInt4QuantHandler(model, GROUP).convert_for_runtime()
    return model.to(bench.device)


@torch.no_grad()
def step_ms(bench: Bench, model: Any, batch: int, depth: int) -> float:
    """Milliseconds of a compiled decode step, its tokens read back: the median."""
    torch.compiler.reset()
    device, steps = bench.device, bench.pick(STEPS, 2)
    model.max_seq_length = model.max_batch_size = -1  # caches of this size, not of the cell before
    with torch.device(device):
        model.setup_caches(max_batch_size=batch, max_seq_length=depth + 2 * steps + 8)
    step = torch.compile(
        one_step(model, device), **bench.pick({"mode": "reduce-overhead", "fullgraph": True}, {"backend": "eager"})
    )
    tokens = torch.ones(batch, 1, dtype=torch.int32, device=device)
    times = []
    for place in range(depth, depth + steps + 4):
        at = torch.tensor([place], dtype=torch.int32, device=device)
        times.append(bench.wall(lambda at=at: step(tokens, at).tolist()))
    return statistics.median(times[4:]) * 1e3


def one_step(model: Any, device: torch.device) -> Callable[..., torch.Tensor]:
    """A function of tokens `[batch, 1]` and their position `[1]`; versions with flex attention also want a mask."""
    if "mask" not in inspect.signature(type(model).forward).parameters:
        return lambda tokens, at: model(tokens, at)[:, -1].argmax(-1)
    from torch.nn.attention.flex_attention import create_block_mask

    length = model.max_seq_length
    whole = create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, length, length, device=device)

    def step(tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        mask = whole[:, :, at // whole.BLOCK_SIZE[0]]
        mask.mask_mod, mask.seq_lengths = whole.mask_mod, (1, length)
        return model(mask, tokens, at)[:, -1].argmax(-1)

    return step
