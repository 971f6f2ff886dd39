"""The garbage collector waits while modules are imported, and afterwards is as it was."""

from __future__ import annotations

import gc
import weakref

from compress.core.imports import imports


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def test_the_collector_waits_and_is_as_it_was() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with imports():
        assert not gc.isenabled()
        with imports():
            pass
        assert not gc.isenabled()  # whoever is outside decides
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_garbage_of_that_time_is_found_later() -> None:
    with imports():
        found = weakref.ref(_Cycle())
    gc.collect()
    assert found() is None
