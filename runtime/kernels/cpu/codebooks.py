"""Layout of row codebooks for this folder's C library: panels of codes, the levels of each row, and weights that are stored singly."""

from __future__ import annotations

import torch

from runtime.formats.representation import Tensors
from runtime.formats.row_codebook import REACH, RowCodebook, columns_of, stored_columns
from runtime.formats.scheme import CompressedWeight
from runtime.kernels.base import Layer
from runtime.kernels.cpu import library
from runtime.kernels.cpu.panels import PANEL, Dense, panels_of

_LEVEL_BASE = REACH + 1  # C reads levels as unsigned bytes


class Codebooks(Dense):
    """Panels of codes; `table`, uint8 `[panels, 2^bits / 4, 32, 4]`: levels + 128 of each row. With outliers also `single_columns`, int32
    `[panels, count, 32]`, and `single_values`, as many; their codes are 0."""

    def __init__(self) -> None:
        super().__init__("panels-codebook", (2, 4), frozenset({RowCodebook.name}))

    def why_not(self, layer: Layer) -> str | None:
        return library.why_not_dtype(layer.dtype)

    def kind(self, layer: Layer) -> str:
        return f"codebook{self.width(layer)}"

    def width(self, layer: Layer) -> int:
        return self._form(layer).bits

    def numbers(self, codes: torch.Tensor, layer: Layer) -> torch.Tensor:
        return codes

    def codes(self, numbers: torch.Tensor, layer: Layer) -> torch.Tensor:
        return numbers.where(numbers < 1 << self.width(layer), 0).to(torch.int8)

    def scales(self, tensors: Tensors, weight: CompressedWeight, layer: Layer) -> Tensors:
        rows, found = layer.shape[0], {"scale": panels_of(tensors["weight_scale"], layer.shape[0])}
        table = (tensors["weight_levels"].int() + _LEVEL_BASE).to(torch.uint8)
        found["table"] = panels_of(table.view(torch.int32), rows).view(torch.uint8)
        if self._form(layer).outliers:
            columns = columns_of(tensors["weight_outlier_columns"]).int()
            found["single_columns"] = panels_of(columns, rows)
            found["single_values"] = panels_of(tensors["weight_outliers"], rows)
        return found

    def unpack(self, tensors: Tensors, layer: Layer) -> CompressedWeight:
        form, rows = self._form(layer), layer.shape[0]

        def rows_of(panels: torch.Tensor) -> torch.Tensor:
            return panels.transpose(1, 2).flatten(0, 1)[:rows].clone(memory_format=torch.contiguous_format)

        levels = rows_of(tensors["table"].view(torch.int32)).view(torch.uint8)
        codes, parameters = self.values(tensors, layer), {"levels": (levels.int() - _LEVEL_BASE).to(torch.int8)}
        parameters["scale"] = rows_of(tensors["scale"])
        if form.outliers:
            parameters["outlier_columns"] = stored_columns(rows_of(tensors["single_columns"]))
            codes = form.with_outliers(codes, parameters, rows_of(tensors["single_values"]))
        return CompressedWeight.of(codes, parameters, None, layer.entry.scheme, layer.dtype)

    def sample(self, layer: Layer) -> Tensors:
        made, shapes = super().sample(layer), self.shapes(layer)
        made["table"] = torch.randint(0, 256, shapes["table"], dtype=torch.uint8)
        if "single_columns" in shapes:
            columns = torch.randint(0, layer.shape[1], shapes["single_columns"], dtype=torch.int32)
            made |= {"single_columns": columns, "single_values": torch.ones_like(columns, dtype=made["scale"].dtype)}
        return made

    def shapes(self, layer: Layer) -> dict[str, tuple[int, int, int]]:
        """Shapes of the tensors that other panels do not have."""
        form, panels = self._form(layer), -(-layer.shape[0] // PANEL)
        found = {"table": (panels, 2**form.bits // 4, 4 * PANEL)}
        if form.outliers:
            found |= dict.fromkeys(("single_columns", "single_values"), (panels, form.count(layer.shape[1]), PANEL))
        return found

    def linear(self, tensors: Tensors, layer: Layer, bias: torch.Tensor | None) -> library.Linear:
        found = super().linear(tensors, layer, bias)
        found.table = tensors["table"].data_ptr()
        if "single_columns" in tensors:
            found.singles = tensors["single_columns"].shape[1]
            found.single_columns, found.single_values = (
                tensors[name].data_ptr() for name in ("single_columns", "single_values")
            )
        return found

    def _form(self, layer: Layer) -> RowCodebook:
        form = layer.entry.scheme.weights
        assert isinstance(form, RowCodebook)
        return form


CODEBOOKS = Codebooks()
