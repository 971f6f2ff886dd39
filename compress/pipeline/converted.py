"""Tensors that the files of a checkpoint hold in another form than the model: experts one by one where the model has them in one tensor,
queries, keys and values in one where the model has them one by one.

Which are which is transformers' to say (`transformers.conversion_mapping`), as when it loads such a checkpoint itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runtime.checkpoint import Checkpoint
from runtime.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
