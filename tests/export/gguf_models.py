"""Tiny models of each family, and GGUF files read by the gguf package alone, for the tests of `--target gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from weight_cases import write_checkpoint

import export
from runtime.formats.scheme import CompressedWeight, Scheme


def export_gguf(path: Path, output: Path, **options: Any) -> Any:
    return export.export(path, "gguf", output, quiet=True, **options)


def read_gguf(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, torch.Tensor]]]:
    """(metadata, {tensor: (type, float32 values)}) of the file, by the gguf package alone."""
    import gguf

    reader = gguf.GGUFReader(folder / "model.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type.name == "F32":  # the package gives these back with their shape
            values = numpy.array(tensor.data)
        else:
            values = gguf.quants.dequantize(numpy.array(tensor.data), tensor.tensor_type)
        tensors[tensor.name] = (tensor.tensor_type.name, torch.from_numpy(numpy.array(values, dtype=numpy.float32)))
    return keys, tensors


def exactly(weight: CompressedWeight) -> torch.Tensor:
    """`(q - z) * scale` without rounding, float32."""
    scheme, columns = weight.scheme.weights, weight.values.shape[1]
    if scheme is None:
        return weight.values.float()
    assert weight.scale is not None
    scale = weight.scale.double() if scheme.strategy == "tensor" else scheme.spread(weight.scale.double(), columns)
    zero: Any = 0
    if weight.zero_point is not None:
        zero = weight.zero_point.double()
        zero = zero if scheme.strategy == "tensor" else scheme.spread(zero, columns)
    return ((weight.values.double() - zero) * scale).float()


def unrotate(values: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows back to transformers': pair i of a head is rows i and i + half."""
    rows, half = values.shape[0], values.shape[0] // heads // 2
    back = torch.empty_like(values)
    for row in range(rows):
        head, inside = divmod(row, 2 * half)
        pair, second = divmod(inside, 2)
        back[head * 2 * half + second * half + pair] = values[row]
    return back


def save_model(family: str, path: Path, dtype: torch.dtype = torch.bfloat16, save: bool = True, **changes: Any) -> Any:
    """A tiny random decoder with values that matter everywhere (biases and norms too), and a tokenizer of bytes."""
    import transformers

    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[family]
    settings: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 257, "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 256,
        "rms_norm_eps": 1e-4,
    }  # fmt: skip
    settings |= {"sliding_window": None} if family == "mistral" else {}
    settings |= {"head_dim": 16} if family == "qwen3" else {}
    if family == "gpt2":
        settings = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 128}
    torch.manual_seed(0)
    made = model(config(**{**settings, **changes}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made = made.to(dtype)
    if save:
        made.save_pretrained(path)
        bytes_tokenizer().save_pretrained(path)
    return made


def bytes_tokenizer() -> Any:
    from byte_tokenizers import plain_byte_tokenizer

    return plain_byte_tokenizer()


def save_compressed(
    path: Path, scheme: Scheme, layer: str = "q_proj", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """A tiny Llama in which one kind of layer has the scheme."""
    model = save_model("llama", path, dtype, save=False, **changes)
    path.mkdir(parents=True, exist_ok=True)
    names = [n for n, m in model.named_modules() if n.endswith(layer) and isinstance(m, torch.nn.Linear)]
    write_checkpoint(path, model, dict.fromkeys(names, scheme), dtype)
    bytes_tokenizer().save_pretrained(path)
    return path
