"""Model made of a checkpoint's tensors alone, for recipes that are `model_free`: modules as the names say, and no code that runs them.

`a.b.weight` of two dimensions, alone or with `a.b.bias`, is a linear layer (or an embedding); every other tensor is one that is copied.
Numbers in names are places in lists, and the outermost lists of modules are the blocks, one after the other in memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import TensorEntry
from runtime.errors import CompressError, RequestError
from runtime.modeling.linear_modules import is_conv1d
from runtime.modeling.skeleton import build_skeleton, read_config
from runtime.modeling.tensor_names import FUSED

#: Last parts of names by which matrices are tables that are looked up, and by which one is the output head though it seems a table.
_TABLE, _HEAD = re.compile(r"emb|wte|wpe"), re.compile(r"lm_head|embed_out|unembed")
_FUSED = {part: whole for whole, parts in FUSED.items() for part in parts}


class TensorModel(nn.Module):
    """The modules of a checkpoint on meta, in the checkpoint's dtypes; linear layers and embeddings in `dtype`.

    Args:
        checkpoint: of any architecture, with the weights of linear layers as `[outputs, inputs]`.

    Raises:
        RequestError: a tensor has a name that no module can have.
    """

    config = PretrainedConfig()  # of no family: what config.json says is for those who have the code
    base_model_prefix = ""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__()
        text = checkpoint.config.get("text_config")
        vocabulary = (text if isinstance(text, dict) else checkpoint.config).get("vocab_size")
        tree: dict[str, Any] = {}
        for name in checkpoint.names():
            node = tree
            *parents, leaf = name.split(".")
            for part in parents:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise RequestError(f"{checkpoint.path}: tensor {name} has the name of another one before its dot")
            if isinstance(node.get(leaf), dict):
                raise RequestError(f"{checkpoint.path}: tensor {name} has the name of a module")
            node[leaf] = checkpoint.entry(name)
        try:
            _fill(self, tree, _Make(dtype, vocabulary))
        except KeyError as error:
            raise RequestError(
                f"{checkpoint.path}: a module of torch cannot hold a tensor of this name: {error.args[0]}"
            ) from error
        self.requires_grad_(False)

    def forward(self, *_: Any, **__: Any) -> Any:
        """RequestError: there is no code."""
        raise RequestError("a model_free recipe runs no model")

    def stacks(self) -> list[tuple[str, nn.ModuleList]]:
        """The outermost lists of modules with parts of their own, in the order of their names."""
        found: list[tuple[str, nn.ModuleList]] = []
        for name, module in self.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer, _ in found)
            if isinstance(module, nn.ModuleList) and not inside and all(any(one.children()) for one in module):
                found.append((name, module))
        return found

    def routers(self) -> set[str]:
        """Names of linear layers beside a list of modules, with one output or one for each: they choose or weigh experts."""
        found = set()
        for name, module in self.named_modules():
            counts = {len(child) for child in module.children() if isinstance(child, nn.ModuleList)}
            for own, child in module.named_children():
                if counts and isinstance(child, nn.Linear) and child.out_features in counts | {1}:
                    found.add(f"{name}.{own}" if name else own)
        return found

    def get_input_embeddings(self) -> nn.Module | None:
        """The first table."""
        return next((module for module in self.modules() if isinstance(module, nn.Embedding)), None)

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear layer with the name of an output head; None: there is none."""
        heads = (module for name, module in self.named_modules() if _HEAD.fullmatch(name.rpartition(".")[2]))
        return next((module for module in heads if isinstance(module, nn.Linear)), None)


def transposed(checkpoint: Checkpoint) -> str | None:
    """A layer whose weight the checkpoint stores as `[inputs, outputs]` (GPT-2's), where transformers has the model's code."""
    try:
        config = read_config(checkpoint.path)
        known = build_skeleton(config, torch.float32, stored=checkpoint.names())
    except CompressError:
        return None
    return next((name for name, module in known.named_modules() if is_conv1d(module)), None)


def same_input(names: Collection[str]) -> list[list[str]]:
    """Layers of a block by what they read, as far as names tell: queries, keys and values, or gate and up."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        home, _, leaf = name.rpartition(".")
        found.setdefault((home, _FUSED.get(leaf, leaf)), []).append(name)
    return list(found.values())


class UnknownModule(nn.Module):
    """A module of which only the tensors are known."""


@dataclass(frozen=True)
class _Make:
    """`dtype`: of matrices. `vocabulary`: rows of the input embeddings, whatever their name; None: not known."""

    dtype: torch.dtype
    vocabulary: int | None

    def is_table(self, name: str, rows: int) -> bool:
        """Whether a matrix is looked up, by the last part of its name."""
        return _HEAD.fullmatch(name) is None and (_TABLE.search(name) is not None or rows == self.vocabulary)


def _fill(module: nn.Module, tree: dict[str, Any], make: _Make) -> None:
    for name, value in tree.items():
        if isinstance(value, TensorEntry):
            held = torch.empty(value.shape, dtype=value.dtype, device="meta")
            module.register_parameter(name, nn.Parameter(held, requires_grad=False))
        else:
            module.add_module(name, _module(name, value, make))


def _module(name: str, tree: dict[str, Any], make: _Make) -> nn.Module:
    if (matrix := _matrix(tree)) is not None:
        rows, columns = matrix.shape
        if "bias" not in tree and make.is_table(name, rows):
            return nn.Embedding(rows, columns, device="meta", dtype=make.dtype)
        return nn.Linear(columns, rows, bias="bias" in tree, device="meta", dtype=make.dtype)
    if tree and sorted(tree, key=_number) == list(map(str, range(len(tree)))) and not any(_tensors(tree)):
        return nn.ModuleList(_module(number, tree[number], make) for number in sorted(tree, key=int))
    part = UnknownModule()
    _fill(part, tree, make)
    return part


def _number(name: str) -> int:
    return int(name) if name.isdigit() else -1


def _tensors(tree: dict[str, Any]) -> Iterator[TensorEntry]:
    return (value for value in tree.values() if isinstance(value, TensorEntry))


def _matrix(tree: dict[str, Any]) -> TensorEntry | None:
    """The weight of a linear layer or embedding; None where these tensors are something else."""
    weight, bias = tree.get("weight"), tree.get("bias")
    if tree.keys() - {"weight", "bias"} or not isinstance(weight, TensorEntry):
        return None
    if len(weight.shape) != 2 or not weight.dtype.is_floating_point or 0 in weight.shape:
        return None
    if "bias" in tree and not (isinstance(bias, TensorEntry) and bias.shape == weight.shape[:1]):
        return None
    return weight
