#!/usr/bin/env python
"""Put a small trained Llama into a large one that computes the same function: real texts and acceptance rates at a large model's cost.

    python benchmarks/expand_core.py recipes/checkpoints/stdlib-4m DIRECTORY [--shape 1.1b] [--layers 22]

The small model's dimensions are the first of the large one's; all other weights are zero, so that they are stored, read and multiplied like
any others and change nothing. Norms are scaled for the zeros that they average over; layers beyond the small model's add nothing. The
vocabulary and the tokenizer stay the small model's. What it writes is checked against the small model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.checkpoint.checkpoint import Checkpoint

SHAPES = {
    "1.1b": {"layers": 22, "hidden": 2048, "intermediate": 5632, "heads": 32, "kv_heads": 4},
    "draft": {"layers": 2, "hidden": 1024, "intermediate": 2816, "heads": 16, "kv_heads": 2},
    "3b": {"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 48, "kv_heads": 8},
}
COMPANIONS = ("tokenizer*.json", "special_tokens_map.json", "generation_config.json")


def expand(source: Path, target: Path, shape: dict[str, int], layers: int | None = None) -> None:
    """Write the large checkpoint, a shard a layer, bfloat16.

    Args:
        source: a Llama with the large one's head size, at most as many heads that share one of keys.
        shape: of `SHAPES`. layers: of the large model; None: the shape's.
    """
    small = Checkpoint(source)
    config: dict[str, Any] = dict(small.config)
    count = shape["layers"] if layers is None else layers
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wide, own = shape["heads"] // shape["kv_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    if head * shape["heads"] != shape["hidden"] or own > wide or config["num_key_value_heads"] > shape["kv_heads"]:
        raise SystemExit(f"{source}: {config['num_attention_heads']} heads of {head} do not fit the shape {shape}")
    if count < config["num_hidden_layers"]:
        raise SystemExit(f"{source} has {config['num_hidden_layers']} layers, more than {count}")
    hidden, inner = shape["hidden"], shape["intermediate"]
    scale = (config["hidden_size"] / hidden) ** 0.5
    # Head h of the small model shares keys with its neighbours: it stands where the large model has the same keys.
    rows = torch.cat(
        [torch.arange(head) + head * (wide * (h // own) + h % own) for h in range(config["num_attention_heads"])]
    )
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    shards = count + 1

    def save(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, target / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    def placed(
        weight: torch.Tensor | None, shape: tuple[int, int], out: torch.Tensor | None, into: torch.Tensor | None
    ) -> torch.Tensor:
        large = torch.zeros(shape, dtype=torch.bfloat16)
        if weight is not None:
            out = torch.arange(weight.shape[0]) if out is None else out
            into = torch.arange(weight.shape[1]) if into is None else into
            large[out[:, None], into] = weight.to(torch.bfloat16)
        return large

    def norm(name: str | None) -> torch.Tensor:
        large = torch.zeros(hidden, dtype=torch.bfloat16)
        if name is not None:
            weight = small.get(name)
            large[: len(weight)] = (weight.float() * scale).to(torch.bfloat16)
        return large

    keys = shape["kv_heads"] * head
    for layer in range(count):
        mine = layer < config["num_hidden_layers"]
        prefix = f"model.layers.{layer}."

        def get(name: str, mine: bool = mine, prefix: str = prefix) -> torch.Tensor | None:
            return small.get(f"{prefix}{name}.weight") if mine else None

        save(layer, {
            f"{prefix}self_attn.q_proj.weight": placed(get("self_attn.q_proj"), (hidden, hidden), rows, None),
            f"{prefix}self_attn.k_proj.weight": placed(get("self_attn.k_proj"), (keys, hidden), None, None),
            f"{prefix}self_attn.v_proj.weight": placed(get("self_attn.v_proj"), (keys, hidden), None, None),
            f"{prefix}self_attn.o_proj.weight": placed(get("self_attn.o_proj"), (hidden, hidden), None, rows),
            f"{prefix}mlp.gate_proj.weight": placed(get("mlp.gate_proj"), (inner, hidden), None, None),
            f"{prefix}mlp.up_proj.weight": placed(get("mlp.up_proj"), (inner, hidden), None, None),
            f"{prefix}mlp.down_proj.weight": placed(get("mlp.down_proj"), (hidden, inner), None, None),
            f"{prefix}input_layernorm.weight": norm(f"{prefix}input_layernorm.weight" if mine else None),
            f"{prefix}post_attention_layernorm.weight": norm(f"{prefix}post_attention_layernorm.weight" if mine else None),
        })  # fmt: skip
    embeddings = small.get("model.embed_tokens.weight")
    head_weight = embeddings if config.get("tie_word_embeddings") else small.get("lm_head.weight")
    size = (config["vocab_size"], hidden)
    save(count, {
        "model.embed_tokens.weight": placed(embeddings, size, None, None), "lm_head.weight": placed(head_weight, size, None, None),
        "model.norm.weight": norm("model.norm.weight"),
    })  # fmt: skip
    config |= {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": count, "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "head_dim": head, "tie_word_embeddings": False,
        "rms_norm_eps": config["rms_norm_eps"] * config["hidden_size"] / hidden,
    }  # fmt: skip
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def check(source: Path, target: Path) -> float:
    """Largest difference of log-probabilities on random tokens, relative to their spread."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(2, 4000, (1, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for path in (source, target):
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            found.append(torch.log_softmax(model(ids).logits, -1))
        del model
    return float((found[0] - found[1]).abs().max() / found[0].std())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    expand(options.source, options.target, SHAPES[options.shape], options.layers)
    print(json.dumps({"target": str(options.target), "difference": check(options.source, options.target)}))


if __name__ == "__main__":
    main()
