"""Order of a layer's inputs with the outliers at the end, where they can have more bits (Zhao et al., Atom, 2023, arXiv 2310.19102)."""

from __future__ import annotations

from compress.quantize.transforms.method import Layers, TransformMethod
from runtime.formats.input_transform import ORDER, InputOrder
from runtime.formats.representation import Tensors


def find(layers: Layers) -> Tensors:
    """Features by ascending mean square, so that those of a group are alike as well; Atom leaves all but the outliers where they were."""
    assert layers.samples is not None
    energy = layers.samples.double().square().sum(0)
    return {ORDER: energy.argsort(stable=True).int()}


METHOD = TransformMethod(
    "outliers_last",
    summary="orders input channels by their size, the largest last, where int8_channels rounds them to 8 bits",
    paper="Zhao et al., Atom, 2023, arXiv 2310.19102",
    find=find,
    needs=frozenset({"samples"}),
    kind=InputOrder,
)
