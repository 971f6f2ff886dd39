"""Which kernels compute each compressed layer, decided before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from runtime import kernels as kernel_table
from runtime.errors import RequestError
from runtime.kernels import Choice, Layer, tuning
from runtime.linear import CompressedLinear
from runtime.module import CompressedModule


@dataclass(frozen=True)
class Chosen:
    """The kernels of one module, and what they were asked for as."""

    choice: Choice
    wanted: str

    @property
    def layout(self) -> str:
        return self.choice.decode.layout


def choose(model: nn.Module, kernels: str, dtype: torch.dtype, device: torch.device) -> dict[str, Chosen]:
    """{compressed module: its kernels}, by the rules of `runtime.linear.prepare_all`: a kernel's name is used where it fits."""
    found: dict[str, Chosen] = {}
    computed: list[tuple[Layer, Choice]] = []
    refused, fits = "", False
    with tuning.measuring():
        for name, module in model.named_modules():
            if not isinstance(module, CompressedModule):
                continue
            if not isinstance(module, CompressedLinear):
                found[name] = Chosen(kernel_table.reference(), kernels)
                continue
            layer = Layer(module.entry, module.shape, dtype, device)
            try:
                found[name] = Chosen(kernel_table.find(layer, kernels), kernels)
                fits = True
            except RequestError as error:
                refused = refused or f"{error} ({name})"
                found[name] = Chosen(kernel_table.find(layer), "auto")
            computed.append((layer, found[name].choice))
    if refused and not fits:
        raise RequestError(refused)
    if kernels != "reference":
        kernel_table.warn_of_reference(computed)
    return found
