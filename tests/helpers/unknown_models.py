"""A checkpoint of an architecture that transformers has no code for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, WIDTH = 3, 4, 64
LINEAR = (
    "mix.q_proj",
    "mix.k_proj",
    "mix.v_proj",
    "mix.out",
    *(f"experts.{e}.w{n}" for e in range(EXPERTS) for n in (1, 2, 3)),
)


def write_unknown(path: Path, dtype: torch.dtype = torch.bfloat16, **config: object) -> dict[str, torch.Tensor]:
    """Blocks with experts one by one and fused, a router, a convolution, a bias, numbers, a second list, tables and a head; its tensors."""

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * (0.5 + torch.rand(shape[0], *[1] * (len(shape) - 1))) / shape[-1] ** 0.5).to(
            dtype
        )

    found = {
        "trunk.tokens.weight": matrix(257, WIDTH),  # a table by its rows
        "trunk.pos_emb.weight": matrix(33, WIDTH),  # and one by its name
        "trunk.norm.weight": torch.ones(WIDTH, dtype=dtype),
        "trunk.counter": torch.tensor([3]),
        "trunk.frequencies": torch.randn(8),
        "lm_head.weight": matrix(257, WIDTH),
        **{
            f"ears.{i}.proj.{leaf}": matrix(*shape)
            for i in range(2)
            for leaf, shape in (("weight", (40, WIDTH)), ("bias", (40,)))
        },
    }
    for index in range(LAYERS):
        home = f"trunk.cells.{index}"
        found |= {
            f"{home}.mix.q_proj.weight": matrix(WIDTH, WIDTH), f"{home}.mix.k_proj.weight": matrix(32, WIDTH),
            f"{home}.mix.v_proj.weight": matrix(32, WIDTH), f"{home}.mix.v_proj.bias": matrix(32),
            f"{home}.mix.out.weight": matrix(WIDTH, WIDTH), f"{home}.gate.weight": matrix(EXPERTS, WIDTH),
            f"{home}.shared_gate.weight": matrix(1, WIDTH), f"{home}.conv.weight": matrix(WIDTH, 1, 4),
            f"{home}.scale": torch.randn(WIDTH), f"{home}.fused": matrix(3, WIDTH, WIDTH), f"{home}.norm.weight": torch.ones(WIDTH),
        }  # fmt: skip
        for number in range(EXPERTS):
            for name, shape in (("w1", (96, WIDTH)), ("w3", (96, WIDTH)), ("w2", (WIDTH, 96))):
                found[f"{home}.experts.{number}.{name}.weight"] = matrix(*shape)
    path.mkdir(parents=True)
    save_file(found, path / "model.safetensors", {"format": "pt"})
    described = {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"], "vocab_size": 257}
    (path / "config.json").write_text(json.dumps({**described, "dtype": str(dtype).removeprefix("torch."), **config}))
    return found


def linear_layers() -> set[str]:
    """Names of the layers that are compressed by default."""
    return {f"trunk.cells.{index}.{name}" for index in range(LAYERS) for name in LINEAR} | {
        f"ears.{i}.proj" for i in range(2)
    }
