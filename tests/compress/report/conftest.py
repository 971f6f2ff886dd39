"""Charts of reports are drawn here, as `quick_runs` leaves out elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compress.report import charts

_written = charts._written  # before `quick_runs`


@pytest.fixture(scope="module", autouse=True)
def drawn(quick_runs: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_written", _written)
        yield
