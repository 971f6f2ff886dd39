"""Context variables: a value for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def assigned(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """While active, the variable has this value in this thread; yields the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
