"""Published names of tensors, where transformers' own modules go by others.

transformers renames tensors as it loads them, and puts experts together (`transformers.conversion_mapping`); other engines know the
published names alone, so artifacts are written with those.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from runtime.modeling.experts import Experts, Layout, experts_layout
from runtime.modeling.skeleton import model_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
FUSED_INTO = {part: whole for whole, parts in _FUSED.items() for part in parts}
"""{layer of a checkpoint: vLLM's name of the layer that engines fuse it into}; what becomes one layer reads the same input."""

# Layers for multi-token prediction that a checkpoint stores behind its last block (DeepSeek-V3 and others): transformers leaves them out,
# other engines use them.


def prediction_tensors(stacks: Iterable[tuple[str, nn.ModuleList]], names: Iterable[str]) -> set[str]:
    """Those of the stored `names` that belong to such a layer.

    It has a number behind the last block's, and something that no block has (what joins a hidden state with an embedding). A layer of
    nothing but what the blocks have is no such layer: config.json says too few then.

    Args:
        stacks: (name, blocks) of `runtime.modeling.skeleton.find_stacks`.
    """
    found: set[str] = set()
    stored = list(names)
    for stack, blocks in stacks:
        place = re.compile(rf"{re.escape(stack)}\.(\d+)(?:\.(.*))?")
        usual, behind = {""}, dict[str, dict[str, str]]()
        for name in stored:
            match = place.fullmatch(name)
            if match is None:
                continue
            local = match[2] or ""
            if int(match[1]) < len(blocks):
                usual.add(local)
            else:
                behind.setdefault(match[1], {})[local] = name
        for tensors in behind.values():
            if tensors.keys() - usual:
                found |= set(tensors.values())
    return found


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Published:
    """The ways between the names of a model's tensors and the published ones.

    Args:
        model: of which the experts may be in one (`runtime.modeling.experts.unfuse`) or one by one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings: list[Any] = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters: list[Any] = [t for t in transforms if isinstance(t, WeightConverter)]
        self._model = model

    @cached_property
    def experts(self) -> dict[str, dict[str, str]]:
        """{module with experts: {projection: published name of that linear layer, with a star for the expert's number}}."""
        found = {}
        for name, module in self._model.named_modules():
            layout = experts_layout(module)
            if layout is not None:
                found[name] = {projection: self._star(name, layout, projection) for projection in layout.projections}
        return found

    def joins_apart(self, transform: Any) -> bool:
        """Whether one of transformers' conversions makes a tensor of all experts in a module that has them one by one."""
        from transformers.core_model_loading import WeightConverter

        return isinstance(transform, WeightConverter) and any(
            f"{name}.{module.layout.home(projection)}".endswith(target)
            for name, module in self._model.named_modules()
            if isinstance(module, Experts)
            for projection in module.layout.projections
            for target in transform._original_target_patterns
        )

    def _star(self, module: str, layout: Layout, projection: str) -> str:
        whole = f"{module}.{layout.home(projection)}"
        among = ["gate_proj", "up_proj"] if layout.gate and projection != "down_proj" else [projection]
        for converter in self._converters:
            # Both are expressions, whose dots may be escaped (Kimi Linear's are) where names have plain ones.
            sources, targets = (
                [pattern.replace(r"\.", ".") for pattern in patterns]
                for patterns in (converter._original_source_patterns, converter._original_target_patterns)
            )
            if (
                [t for t in targets if whole.endswith(t)] == targets
                and len(sources) == len(among)
                and "*" in sources[0]
            ):
                name = whole.removesuffix(targets[0]) + sources[among.index(projection)]
                for renaming in reversed(self._renamings):
                    name = renaming.reverse_transform().rename_source_key(name)[0]
                return name.removesuffix(".weight")
        return f"{module}.*.{projection}"

    @cached_property
    def _stars(self) -> dict[str, tuple[str, str]]:
        """{published name with a star: (module with experts, projection)}; the model's own names too."""
        own = {f"{name}.*.{p}": (name, p) for name, stars in self.experts.items() for p in stars}
        return own | {star: (name, p) for name, stars in self.experts.items() for p, star in stars.items()}

    def layer_names(self) -> dict[str, str]:
        """{published: the model's} last names of experts' linear layers, where the two differ."""
        both = {
            star.rpartition(".")[2]: projection for stars in self.experts.values() for projection, star in stars.items()
        }
        return {old: new for old, new in both.items() if old != new}

    def module_place(self, name: str) -> str:
        """The model's name of a module that is published as `name`."""
        return self.place(f"{name}.weight").removesuffix(".weight")

    def place(self, name: str) -> str:
        """The model's name of a tensor that is published as `name`, with experts one by one."""
        found = self._expert(name)
        if found is not None:
            return found
        for renaming in self._renamings:
            name = renaming.rename_source_key(name)[0]
        return self._expert(name) or name

    def _expert(self, name: str) -> str | None:
        module, _, leaf = name.rpartition(".")
        for number in _NUMBER.finditer(module):
            star = f"{module[: number.start()]}*{module[number.end() :]}"
            if star in self._stars:
                home, projection = self._stars[star]
                return f"{home}.{number[0]}.{projection}.{leaf}"
        return None


# Which tensor of a checkpoint is which of a model, where the two were written by different classes or versions.

# What norms' parameters were called in checkpoints that were converted from TensorFlow.
_OLD = {"gamma": "weight", "beta": "bias"}


def match_names(model: PreTrainedModel, stored: Collection[str], places: Collection[str]) -> dict[str, str]:
    """{name in the model: name in the checkpoint} for every tensor of `places` that is stored under some name.

    Checkpoints of a bare base model lack its prefix ("transformer."), those of a model with a head have it where a bare model
    has none, old ones say gamma and beta, and some families are published with other names than transformers' (`Published`).
    """
    names: dict[str, str] = {}
    there = set(stored)
    for name in sorted(there):
        found = next((candidate for candidate in _candidates(model, name) if candidate in places), None)
        # A tensor stored under the very name of a place wins over one that has to be renamed.
        if found is not None and (found == name or (found not in there and found not in names)):
            names[found] = name
    left = there - set(names.values())
    if left and set(places) - names.keys():
        published = Published(model)
        for name in sorted(left):
            found = published.place(name)
            if found in places and found not in names:
                names[found] = name
    return names


def without_place(model: PreTrainedModel, name: str) -> str:
    """Why `name`, which is stored but has no place in `model`, may be left out; empty when it may not.

    Encoders only: a pooler, or a head that the class named in config.json does not have. Anything inside of the encoder
    that has no place means that config.json describes another model.
    """
    if model_kind(model.config) != "encoder":
        return ""
    base = model.base_model
    local = name.removeprefix(f"{model.base_model_prefix}.")
    first = local.partition(".")[0]
    if first == "pooler" and getattr(base, "pooler", None) is None:
        return f"{type(model).__name__} has no pooler"
    if hasattr(base, first):
        return ""
    if not hasattr(model, first):
        return f"{type(model).__name__} has no {first}"
    # "cls" is a child of BertForMaskedLM, whose own head is complete: what else is stored below it is another head's.
    second = local.split(".")[1] if "." in local else ""
    return (
        ""
        if not second or hasattr(getattr(model, first), second)
        else f"{type(model).__name__} has no {first}.{second}"
    )


def _candidates(model: PreTrainedModel, name: str) -> Iterator[str]:
    prefix = f"{model.base_model_prefix}."
    head, _, leaf = name.rpartition(".")
    for spelled in (name, f"{head}.{_OLD[leaf]}" if leaf in _OLD else name):
        yield spelled
        yield prefix + spelled
        if spelled.startswith(prefix):
            yield spelled.removeprefix(prefix)
