"""The source checkpoint under the names that the model gives its tensors, and what of it the model has no place for."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import TensorEntry
from runtime.errors import ArtifactError
from runtime.modeling.experts import Experts, Layout
from runtime.modeling.skeleton import model_kind, tied_names
from runtime.modeling.tensor_names import Published, match_names, without_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Tensors that the files of a checkpoint hold in another form than the model: experts one by one where the model has them in one tensor,
# queries, keys and values in one where the model has them one by one.
#
# Which are which is transformers' to say (`transformers.conversion_mapping`), as when it loads such a checkpoint itself.


@dataclass(frozen=True)
class Converted:
    """A tensor of a model that is made of others, or of a part of one.

    Attributes:
        name: the model's.
        parts: {pattern of the converter: names in the files, in its order}.
        converter: transformers' `WeightConverter`, as it was registered.
        model: whose tensor it is, on meta.
    """

    name: str
    parts: dict[str, list[str]]
    converter: Any
    model: PreTrainedModel

    @property
    def sources(self) -> list[str]:
        """All names in the files."""
        return [name for names in self.parts.values() for name in names]

    def build(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The tensor, out of what `read` gives for names in the files; on meta it gives the shape alone.

        Raises:
            ArtifactError: the parts do not go together.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.parts.items():
            converter.collected_tensors[pattern] = [read(name) for name in names]
        try:
            made = converter.convert(self.name, model=self.model, config=self.model.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            raise ArtifactError(
                f"{self.name} cannot be put together of {len(self.sources)} tensors ({self.sources[0]}, ...): {error}"
            ) from error
        value = made[self.name]
        return value[0] if isinstance(value, list) else value


def find_converted(
    model: PreTrainedModel, checkpoint: Checkpoint, places: Collection[str]
) -> tuple[dict[str, str], dict[str, Converted]]:
    """What transformers would rename, and what it would put together, of a checkpoint whose names are not all the model's.

    Args:
        places: names of the model's tensors.

    Returns:
        {the model's name: the name in the files}, and {the model's name: how it is made} of tensors that are made of several, or of a part
        of one (queries, keys and values). What several become several of is left alone.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    there = dict.fromkeys(places, True)
    renamed: dict[str, str] = {}
    made: dict[str, Converted] = {}
    for name in sorted(checkpoint.names(), key=dot_natural_key):
        if name in there:
            continue
        found, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        if found not in there or checkpoint.has(found):
            continue
        if pattern is None:
            renamed[found] = name
        elif len(by_pattern[pattern].target_patterns) == 1:
            whole = made.setdefault(found, Converted(found, {}, by_pattern[pattern], model))
            whole.parts.setdefault(pattern, []).append(name)
        elif len(by_pattern[pattern].source_patterns) == 1:
            # The name that was found is the first part's.
            targets = by_pattern[pattern].target_patterns
            before, _, after = found.partition(targets[0])
            for place in (before + target + after for target in targets):
                if place in there and not checkpoint.has(place):
                    made[place] = Converted(place, {pattern: [name]}, by_pattern[pattern], model)
    return renamed, made


# Tensors of single experts, out of files that hold those of all experts of a layer in one.


@dataclass(frozen=True)
class ExpertTensor:
    """Where a tensor of one expert is.

    Attributes:
        whole: what the model would call the tensor of all experts. source: that tensor in the files.
        number, projection, bias: which one of it.
    """

    whole: str
    source: TensorEntry
    layout: Layout
    number: int
    projection: str
    bias: bool

    @property
    def home(self) -> str:
        """The module that holds the experts."""
        return self.whole.rpartition(".")[0]

    @property
    def published(self) -> str:
        """What an artifact calls it: there is no published name, so it is named as other families name theirs."""
        home, _, leaf = self.source.name.rpartition(".")
        if leaf != self.whole.rpartition(".")[2]:
            # A tensor that is published as a module's weight (Granite's output_linear.weight) says nothing of where experts are.
            home = self.home
        return f"{home}.{self.number}.{self.projection}.{'bias' if self.bias else 'weight'}"

    def read(self, files: Checkpoint) -> torch.Tensor:
        """The tensor; of the file nothing but this expert's part is read."""
        return self.layout.part(self.projection, files.get_item(self.source.name, self.number), self.bias)

    def entry(self, name: str) -> TensorEntry:
        """Its shape and size, at the place of the whole."""
        inputs, outputs = self.layout.hidden, self.layout.inner
        if self.projection == "down_proj":
            inputs, outputs = outputs, inputs
        shape = (outputs,) if self.bias else (outputs, inputs)
        size = torch.Size(shape).numel() * self.source.dtype.itemsize
        return TensorEntry(name, self.source.file, self.source.dtype, shape, self.source.offset, size)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, str, Layout, str, bool]]:
    """Where a model has its experts apart: the name that it would give the tensor of all experts of a layer, their home, their layout, and
    the projection whose weight (False) or bias (True) it is."""
    for home, module in model.named_modules():
        if isinstance(module, Experts):
            for projection in module.layout.projections:
                for bias in (False, True) if module.layout.bias else (False,):
                    yield f"{home}.{module.layout.home(projection, bias)}", home, module.layout, projection, bias


def _find_expert_tensors(model: PreTrainedModel, named: Mapping[str, TensorEntry]) -> dict[str, ExpertTensor]:
    """{the model's name: where it is} of the tensors of experts that are apart in the model and in one in the files.

    Args:
        named: {name that the model would give it with its experts in one: tensor in the files}.

    Raises:
        ArtifactError: a tensor of all experts has another shape than config.json says.
    """
    found: dict[str, ExpertTensor] = {}
    for whole, home, layout, projection, bias in _matrices(model):
        if whole not in named:
            continue
        stored, shape = named[whole], layout.shape(projection, bias)
        if stored.shape != shape:
            raise ArtifactError(
                f"{stored.file}: tensor {stored.name} has shape {list(stored.shape)}, config.json asks for {list(shape)}"
            )
        for number in range(layout.count):
            own = f"{home}.{number}.{projection}.{'bias' if bias else 'weight'}"
            found[own] = ExpertTensor(whole, stored, layout, number, projection, bias)
    return found


_POSITIONS = re.compile(r"(^|\.)position_ids$")


class SourceCheckpoint(Checkpoint):
    """A checkpoint whose tensors go by the model's names.

    Attributes:
        renamed: {the model's name: the name in the files} where the two differ; of a tensor that the files hold in parts, the first.
        expert_tensors: {the model's name: where it is} of tensors of single experts that the files hold in one.
        converted: {the model's name: how it is made} of tensors that the files hold in parts (experts one by one).
        dropped: {name: why} of tensors that no artifact needs.

    Raises:
        ArtifactError: an encoder's checkpoint holds something that config.json does not describe.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, places: Collection[str]) -> None:
        self.__dict__.update(copy.copy(checkpoint.__dict__))
        self.renamed = {new: old for new, old in match_names(model, checkpoint.names(), places).items() if new != old}
        self.converted: dict[str, Converted] = {}
        self._files = checkpoint
        self._published = Published(model)
        back = {old: new for new, old in self.renamed.items()}
        wholes = {whole for whole, *_ in _matrices(model)}
        for name in checkpoint.names() if wholes else ():
            if name not in back and (place := self._published.place(name)) in wholes:
                back[name] = place
        named = {back.get(name, name): checkpoint.entry(name) for name in checkpoint.names()}
        self.expert_tensors = _find_expert_tensors(model, named)
        for name in {part.whole for part in self.expert_tensors.values()}:
            del named[name]
        for name, part in self.expert_tensors.items():
            named[name] = part.entry(name)
            self.renamed[name] = part.source.name
        if not set(places) - _shared(model) <= named.keys() and not set(named) <= set(places):
            self._convert(model, places, named)
        self._tensors = dict(sorted(named.items()))
        self.dropped: dict[str, str] = dict(getattr(checkpoint, "folded", {}))
        if model_kind(model.config) != "encoder":
            return
        for name in sorted(self._tensors.keys() - set(places)):
            reason = "the model computes it" if _POSITIONS.search(name) else without_place(model, name)
            if not reason:
                raise ArtifactError(f"{checkpoint.path}: {type(model).__name__} has no place for tensor {name}")
            self.dropped[name] = reason

    def _convert(self, model: PreTrainedModel, places: Collection[str], named: dict[str, TensorEntry]) -> None:
        """Put tensors that transformers would rename, or make out of several, into `named`, in the place of those in the files."""
        checkpoint = self._files
        renamed, self.converted = find_converted(model, checkpoint, places)
        for name, stored in renamed.items():
            named.pop(stored, None)
            named[name] = checkpoint.entry(stored)
            self.renamed[name] = stored
        for name, made in self.converted.items():
            entries = [checkpoint.entry(stored) for stored in made.sources]
            for stored in made.sources:
                named.pop(stored, None)
            form = made.build(
                lambda stored: torch.empty(checkpoint.shape(stored), dtype=checkpoint.dtype(stored), device="meta")
            )
            size = form.numel() * form.element_size()
            named[name] = TensorEntry(name, entries[0].file, form.dtype, tuple(form.shape), entries[0].offset, size)
            self.renamed[name] = made.sources[0]

    def get(self, name: str) -> torch.Tensor:
        """One tensor, put together where the files hold it in parts, or taken out of theirs; see `Checkpoint.get`."""
        if name in self.expert_tensors:
            return self.expert_tensors[name].read(self._files)
        made = self.converted.get(name)
        return self._files.get(self.entry(name).name) if made is None else made.build(self._files.get)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor in its file, or files."""
        return self.entry(name).nbytes if self.has(name) else self._files.nbytes(name)

    def whole(self, name: str) -> torch.Tensor:
        """What the files hold in one of which tensor `name` is a part."""
        return self._files.get(self.expert_tensors[name].source.name)

    # ---------------------------------------------------------------- what artifacts call them
    def published(self, name: str) -> str:
        """What an artifact calls a tensor of the model: as the files do where transformers knows that name."""
        stored = self.renamed.get(name)
        if name in self.expert_tensors:
            return self.expert_tensors[name].published
        if stored is None or name in self.converted:
            return name
        return stored if self._published.place(stored) == name else name

    def published_module(self, name: str) -> str:
        """As `published`, of a module with a weight."""
        return self.published(f"{name}.weight").removesuffix(".weight")


def _shared(model: PreTrainedModel) -> set[str]:
    """Names that need no tensor of their own, since one that they are tied to may be stored."""
    return {name for pair in tied_names(model).items() for name in pair}


class DerivedCheckpoint(SourceCheckpoint):
    """A checkpoint whose tensors are made of another one's as they are read.

    Args:
        form: names, shapes and dtypes. derive: makes a tensor, by its name.
    """

    def __init__(self, form: SourceCheckpoint, derive: Callable[[str], torch.Tensor]) -> None:
        self.__dict__.update(form.__dict__)
        self._derive = derive

    def get(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._derive(name)
