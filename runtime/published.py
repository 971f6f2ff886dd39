"""Published names of tensors, where transformers' own modules go by others.

transformers renames tensors as it loads them, and puts experts together (`transformers.conversion_mapping`); other engines know the
published names alone, so artifacts are written with those.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from runtime.experts import Experts, Layout, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Published:
    """The ways between the names of a model's tensors and the published ones.

    Args:
        model: of which the experts may be in one (`runtime.experts.unfuse`) or one by one.
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
            layout = module.layout if isinstance(module, Experts) else layout_of(module)
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
