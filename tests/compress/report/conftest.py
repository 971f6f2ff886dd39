"""Charts of reports are drawn here, which `quick_runs` leaves empty elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import report_charts


@pytest.fixture(scope="module", autouse=True)
def drawn(quick_runs: None) -> Iterator[None]:
    with report_charts.drawn():
        yield
