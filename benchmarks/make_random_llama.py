#!/usr/bin/env python
"""Write a Llama (or, with --experts, Mixtral) checkpoint with random weights, a layer at a time: for time and memory, never quality.

python benchmarks/make_random_llama.py DIRECTORY [--layers 22] [--hidden 2048] [--experts 32 --chosen 4] [--tokenizer CHECKPOINT]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def write(
    directory: Path,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    experts: int = 0,
    chosen: int = 0,
    positions: int = 2048,
) -> None:
    """Shards of one layer each, bfloat16, normal weights of the usual 0.02 standard deviation.

    `experts`: of every layer, each `intermediate` wide; 0: a dense Llama.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    head = hidden // heads

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)

    def feed_forward(prefix: str) -> dict[str, torch.Tensor]:
        if not experts:
            return {
                f"{prefix}.mlp.gate_proj.weight": random(intermediate, hidden),
                f"{prefix}.mlp.up_proj.weight": random(intermediate, hidden),
                f"{prefix}.mlp.down_proj.weight": random(hidden, intermediate),
            }
        found = {f"{prefix}.block_sparse_moe.gate.weight": random(experts, hidden)}
        for expert in range(experts):
            here = f"{prefix}.block_sparse_moe.experts.{expert}"
            found |= {f"{here}.w{k}.weight": random(intermediate, hidden) for k in (1, 3)}
            found[f"{here}.w2.weight"] = random(hidden, intermediate)
        return found

    weight_map: dict[str, str] = {}
    total = 0
    shards = layers + 1
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        if shard < layers:
            prefix = f"model.layers.{shard}"
            tensors = {
                f"{prefix}.self_attn.q_proj.weight": random(hidden, hidden),
                f"{prefix}.self_attn.k_proj.weight": random(kv_heads * head, hidden),
                f"{prefix}.self_attn.v_proj.weight": random(kv_heads * head, hidden),
                f"{prefix}.self_attn.o_proj.weight": random(hidden, hidden),
                **feed_forward(prefix),
                f"{prefix}.input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
                f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            }
        else:
            tensors = {
                "model.embed_tokens.weight": random(vocabulary, hidden),
                "lm_head.weight": random(vocabulary, hidden),
                "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            }
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config: dict[str, object] = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": chosen, "sliding_window": None}
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--experts", type=int, default=0, help="of every layer; 0: a dense Llama")
    parser.add_argument("--chosen", type=int, default=2, help="experts that a token goes to")
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument(
        "--tokenizer", type=Path, help="checkpoint whose tokenizer is copied (its ids must fit the vocabulary)"
    )
    options = parser.parse_args()
    shape = (options.layers, options.hidden, options.intermediate, options.heads, options.kv_heads, options.vocabulary)
    more = {"experts": options.experts, "chosen": options.chosen, "positions": options.positions}
    write(options.directory, *shape, **more)
    if options.tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (options.tokenizer / name).exists():
                shutil.copyfile(options.tokenizer / name, options.directory / name)


if __name__ == "__main__":
    main()
