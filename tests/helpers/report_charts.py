"""Charts of reports: drawn, or left empty where nobody looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compress.report import charts

_DRAWN = {name: getattr(charts, name) for name in ("error_chart", "bits_chart", "bytes_chart", "svg_file")}


def _empty(what: Any, *_: Any) -> str:
    return '<svg class="chart" role="img"></svg>' if what else ""


@contextmanager
def undrawn() -> Iterator[None]:
    """Charts come out empty: drawing them takes a third of a run of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _DRAWN:
            patch.setattr(charts, name, _empty)
        yield


@contextmanager
def drawn() -> Iterator[None]:
    """Charts are drawn, inside of `undrawn` too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in _DRAWN.items():
            patch.setattr(charts, name, draw)
        yield
