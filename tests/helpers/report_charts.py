"""Charts of reports: drawn, or left empty where nobody looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compress.report import charts

EMPTY = '<svg class="chart" role="img"></svg>'
_UNDRAWN: dict[str, Any] = {
    "error_chart": lambda layers, *_: EMPTY if any(each.get("error") is not None for each in layers) else "",
    "bits_chart": lambda layers: EMPTY if layers else "",
    "bytes_chart": lambda before, after: EMPTY,
    "svg_file": lambda figure: "<svg></svg>",
}
_DRAWN = {name: getattr(charts, name) for name in _UNDRAWN}


@contextmanager
def undrawn() -> Iterator[None]:
    """Charts come out empty: drawing them takes a third of a run of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        for name, leave_out in _UNDRAWN.items():
            patch.setattr(charts, name, leave_out)
        yield


@contextmanager
def drawn() -> Iterator[None]:
    """Charts are drawn, inside of `undrawn` too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in _DRAWN.items():
            patch.setattr(charts, name, draw)
        yield
