"""Imports without pauses: modules are many objects and no garbage, so the collector does not look through them as they come."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports() -> Iterator[None]:
    """While active, the garbage collector waits. It takes a fifth of the time that importing torch and transformers takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # What has come is old at once, without a look at it. What is frozen already thaws, which only means that it is looked at again.
            gc.freeze()
            gc.unfreeze()
            gc.enable()
