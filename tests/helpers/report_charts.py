"""Charts of reports: drawn, or left empty where nobody looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from compress.report import charts

_svg_file = charts.svg_file


@contextmanager
def undrawn() -> Iterator[None]:
    """Charts are built, but come out empty: drawing them takes a third of a run of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "svg_file", lambda figure: "<svg></svg>")
        yield


@contextmanager
def drawn() -> Iterator[None]:
    """Charts are drawn, inside of `undrawn` too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "svg_file", _svg_file)
        yield
