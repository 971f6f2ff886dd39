"""Plain torch with its own int4 kernel (`_weight_int4pack_mm_for_cpu`, bfloat16 activations): gpt-fast, in short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_common import (
    GROUP,
    Checkpoint,
    Engine,
    Shape,
    error_of,
    layer_matrices,
    layer_norms,
    main,
    matvec_data,
    measure,
    rotary,
    rtn,
    time_matvec,
)
from safetensors.torch import load_file, save_file
from torch.nn import functional

FILE = "torch_int4.safetensors"


def pack(codes: np.ndarray, scale: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel reads: packed codes, and scale and zero side by side `[groups, n, 2]`."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
    s = torch.from_numpy(scale).to(torch.bfloat16).t()
    return packed, torch.stack([s, torch.zeros_like(s)], -1).contiguous()


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    shape, source = Shape.read(request["model"]), Checkpoint(request["model"])
    tensors = {"embed": source["model.embed_tokens.weight"], "norm": source["model.norm.weight"]}
    matrices = {f"{i}.{k}": names for i in range(shape.layers) for k, names in layer_matrices(i).items()}
    for name, parts in {**matrices, "head": ["lm_head.weight"]}.items():
        tensors[f"{name}.codes"], tensors[f"{name}.scale"] = pack(*rtn(source.array(*parts)))
    for i in range(shape.layers):
        tensors[f"{i}.norm1"], tensors[f"{i}.norm2"] = (source[name] for name in layer_norms(i))
    path = Path(request["path"])
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / FILE)
    return {"bytes": (path / FILE).stat().st_size}


class Decoder:
    """Functional Llama over a dictionary of tensors and a static cache."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        self.shape = s = Shape.read(request["model"])
        self.context = request["context"]
        self.tensors = load_file(Path(request["path"]) / FILE)
        cos, sin = (torch.from_numpy(t) for t in rotary(s, self.context))
        self.cos, self.sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        self.keys = torch.zeros(s.layers, 1, s.kv_heads, self.context, s.head, dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)
        self.mask = torch.ones(self.context, self.context, dtype=torch.bool).tril()
        self.length = 0
        self.decode = torch.compile(self.forward, dynamic=False, fullgraph=True) if request["compile"] else self.forward

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        codes, scale = self.tensors[f"{name}.codes"], self.tensors[f"{name}.scale"]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, GROUP, scale)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (self.shape.hidden,), self.tensors[name], self.shape.eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, heads, head]."""
        low, high = x.float().chunk(2, -1)
        turned = x.float() * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
        return turned.to(x.dtype)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        s, rows = self.shape, ids.shape[0]
        x = functional.embedding(ids, self.tensors["embed"])
        cos, sin = self.cos[positions], self.sin[positions]
        # A prompt starts at 0 and looks at itself only; a step looks at the whole cache through the mask.
        mask = self.mask[positions][None, None] if rows == 1 else None
        for i in range(s.layers):
            qkv = self.linear(self.norm(x, f"{i}.norm1"), f"{i}.qkv")
            q, k, v = qkv.split([s.heads * s.head, s.kv_heads * s.head, s.kv_heads * s.head], -1)
            q = self.rotate(q.view(rows, s.heads, s.head), cos, sin).transpose(0, 1)[None]
            k = self.rotate(k.view(rows, s.kv_heads, s.head), cos, sin).transpose(0, 1)[None]
            v = v.view(rows, s.kv_heads, s.head).transpose(0, 1)[None]
            self.keys[i].index_copy_(2, positions, k)
            self.values[i].index_copy_(2, positions, v)
            if rows == 1:
                k, v = self.keys[i], self.values[i]
            y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=rows > 1, enable_gqa=True)
            x = x + self.linear(y[0].transpose(0, 1).reshape(rows, -1), f"{i}.o")
            h = self.norm(x, f"{i}.norm2")
            x = x + self.linear(functional.silu(self.linear(h, f"{i}.gate")) * self.linear(h, f"{i}.up"), f"{i}.down")
        return self.linear(self.norm(x[-1:], "norm"), "head")[0]

    def run(self, forward: Any, ids: Sequence[int]) -> np.ndarray:
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        with torch.inference_mode():
            return forward(torch.tensor(list(ids)), positions).float().numpy()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.length = 0
        return self.run(self.forward, ids)

    def step(self, token: int) -> np.ndarray:
        return self.run(self.decode, [token])


def load(request: dict[str, Any]) -> Engine:
    return Decoder(request)


def matvec(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    x = torch.randn(1, request["columns"]).to(torch.bfloat16)
    copies, error = [], 0.0
    op = torch.ops.aten._weight_int4pack_mm_for_cpu
    for codes, scale in matvec_data(request):
        copies.append(pack(codes, scale))
        if len(copies) == 1:
            product = op(x, copies[0][0], request["group"], copies[0][1])
            error = error_of(product.float().numpy(), codes, scale, x.float().numpy())

    def run() -> None:
        for codes, scale in copies:
            op(x, codes, request["group"], scale)

    size = sum(t.numel() * t.element_size() for t in copies[0])
    return {**time_matvec(request, run, len(copies), size), "relative_error": error}


if __name__ == "__main__":
    main(
        {"prepare": prepare, "measure": lambda request: measure(request, load), "matvec": matvec},
        "torch",
    )
