"""Model made of a checkpoint's tensors alone, for recipes that are `model_free`: modules as the names say, and no code that runs them.

`a.b.weight` of two dimensions, alone or with `a.b.bias`, is a linear layer or an embedding table; every other tensor is copied. Modules
with numbers for names are a list, and the members of the outermost lists are the blocks, which are in memory one at a time. What is in no
list is in memory together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
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
from runtime.modeling.tensor_names import FUSED_INTO
from runtime.modeling.weights import FLOATS

#: Modules that are lookup tables, and those that are the output head, by the last part of their names.
_TABLE, _HEAD = re.compile(r"emb|wte|wpe|attention_bias$"), re.compile(r"lm_head|embed_out|unembed")
#: Smallest side of a matrix: tensors of three dimensions with a shorter one are kernels of convolutions, and hold no experts.
_NARROWEST = 16


class UnknownModule(nn.Module):
    """A module of which only the tensors are known."""


class Numbered(nn.ModuleList):
    """A list whose members keep their numbers, which may have gaps or zeros in front."""

    def __init__(self, members: dict[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(members)


class TensorModel(UnknownModule):
    """The modules of a checkpoint on meta, in the checkpoint's dtypes; linear layers and tables in `dtype`.

    Args:
        checkpoint: of any architecture, with the weights of linear layers as `[outputs, inputs]`.

    Raises:
        RequestError: a tensor has a name that no module can have, or a dtype that means nothing without its scales.
    """

    config = PretrainedConfig()  # empty: config.json is copied and, but for the size of the vocabulary, not read
    base_model_prefix = ""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__()
        tree: dict[str, Any] = {}
        for name in checkpoint.names():
            entry = checkpoint.entry(name)
            if entry.dtype.is_floating_point and entry.dtype not in FLOATS:
                text = "and no quantization_config in config.json says how they are scaled"
                raise RequestError(f"{checkpoint.path}: tensor {name} holds numbers of {entry.dtype}, {text}")
            node = tree
            *parents, leaf = name.split(".")
            for part in parents:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise RequestError(f"{checkpoint.path}: tensor {name} has the name of another tensor as its prefix")
            if leaf in node:
                raise RequestError(f"{checkpoint.path}: tensor {name} has the name of a module")
            node[leaf] = entry
        _Builder(dtype, frozenset(vocabularies(checkpoint.config))).fill(self, tree)
        self.requires_grad_(False)

    def forward(self, *_: Any, **__: Any) -> Any:
        """RequestError: there is no code."""
        raise RequestError("a recipe that is model_free runs no model")

    def get_input_embeddings(self) -> nn.Module | None:
        """The first table."""
        return next((module for module in self.modules() if isinstance(module, nn.Embedding)), None)

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear layer with the name of an output head; None: there is none."""
        heads = (module for name, module in self.named_modules() if _HEAD.fullmatch(name.rpartition(".")[2]))
        return next((module for module in heads if isinstance(module, nn.Linear)), None)


def vocabularies(config: Mapping[str, Any]) -> Iterator[int]:
    """Sizes of vocabularies that a config names, in whatever part of it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from vocabularies(value)
        elif name == "vocab_size" and isinstance(value, int):
            yield value


@dataclass(frozen=True)
class _Builder:
    """Builds modules from a tree of names; `dtype`: of matrices, `vocabularies`: rows of tables and heads, whatever their names."""

    dtype: torch.dtype
    vocabularies: frozenset[int]

    def fill(self, module: nn.Module, tree: dict[str, Any], numbered: bool = False) -> None:
        """Give a module what is below its name; `numbered`: it is in a list."""
        for name, value in tree.items():
            try:
                if isinstance(value, TensorEntry):
                    held = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    module.register_parameter(name, nn.Parameter(held, requires_grad=False))
                else:
                    module.add_module(name, self._module(name, value, numbered))
            except KeyError as error:
                first = value.name if isinstance(value, TensorEntry) else next(_entries(value)).name
                raise RequestError(
                    f"tensor {first}: without its code a model cannot have a part that is called '{name}'"
                ) from error

    def _module(self, name: str, tree: dict[str, Any], numbered: bool) -> nn.Module:
        matrix = _matrix(tree)
        if matrix is not None:
            rows, columns = matrix.shape
            sized = not numbered and rows in self.vocabularies
            if "bias" not in tree and not _HEAD.fullmatch(name) and (sized or _TABLE.search(name)):
                return nn.Embedding(rows, columns, device="meta", dtype=self.dtype)
            return nn.Linear(columns, rows, bias="bias" in tree, device="meta", dtype=self.dtype)
        if all(_is_number(part) and isinstance(value, dict) for part, value in tree.items()):
            return Numbered({number: self._module(number, tree[number], True) for number in sorted(tree, key=int)})
        part = UnknownModule()
        self.fill(part, tree, numbered)
        return part


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _entries(tree: dict[str, Any]) -> Iterator[TensorEntry]:
    for value in tree.values():
        if isinstance(value, TensorEntry):
            yield value
        else:
            yield from _entries(value)


def _matrix(tree: dict[str, Any]) -> TensorEntry | None:
    """The weight of a linear layer or table; None where these tensors are something else."""
    weight, bias = tree.get("weight"), tree.get("bias")
    if tree.keys() - {"weight", "bias"} or not isinstance(weight, TensorEntry):
        return None
    if len(weight.shape) != 2 or weight.dtype not in FLOATS or 0 in weight.shape:
        return None
    if "bias" in tree and not (isinstance(bias, TensorEntry) and bias.shape == weight.shape[:1]):
        return None
    return weight


# ------------------------------------------------------------ what the names tell
def outermost_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Names and lists of the blocks: lists in no other one, whose members are more than single layers."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if not isinstance(module, nn.ModuleList) or inside:
            continue
        if any(any(one.children()) for one in module) and not any(isinstance(one, _LAYERS) for one in module):
            found.append((name, module))
    return found


_LAYERS = (nn.Linear, nn.Embedding)


def routers_by_name(model: nn.Module) -> set[str]:
    """Names of the linear layers that choose or weigh experts: with one output or one for each, beside a list inside of a part, or beside
    a tensor of three dimensions that holds as many matrices. It costs little to leave others of such a shape as they are."""
    found: set[str] = set()
    modules, blocks = dict(model.named_modules()), dict(outermost_lists(model))
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and name not in blocks and _home(name):
            numbers = [int(number) for number in module._modules]
            _add_routers(found, modules, _home(name), name, {len(numbers), max(numbers, default=0) + 1})
        held = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3 and min(p.shape[1:]) >= _NARROWEST]
        for home in {name, _home(name)} if held else ():
            _add_routers(found, modules, home, "" if home == name else name, set(held))
    return found


def _home(name: str) -> str:
    return name.rpartition(".")[0]


def _add_routers(found: set[str], modules: dict[str, nn.Module], home: str, experts: str, counts: set[int]) -> None:
    """Add to `found` the linear layers below `home`, but not below `experts`, with one output or as many as one of `counts`."""
    for own, child in modules[home].named_modules(prefix=home):
        inside = bool(experts) and (own == experts or own.startswith(f"{experts}."))
        if not inside and isinstance(child, nn.Linear) and child.out_features in counts | {1}:
            found.add(own)


def same_input(names: Collection[str]) -> list[list[str]]:
    """Layers by what they read, as far as names tell: queries, keys and values of one layer, or gate and up."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        home, _, leaf = name.rpartition(".")
        found.setdefault((home, FUSED_INTO.get(leaf, leaf)), []).append(name)
    return list(found.values())


def transposed(checkpoint: Checkpoint) -> str | None:
    """A layer whose weight the checkpoint stores as `[inputs, outputs]` (GPT-2's), where transformers has the model's code."""
    try:
        config = read_config(checkpoint.path)
        known = build_skeleton(config, torch.float32, stored=checkpoint.names())
    except CompressError:
        return None
    return next((name for name, module in known.named_modules() if is_conv1d(module)), None)
