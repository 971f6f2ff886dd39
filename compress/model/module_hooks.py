"""Forward hooks on several modules of a model, for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def hooks(
    found: Mapping[nn.Module, Callable[..., Any]], before: bool = False, keywords: bool = False
) -> Iterator[None]:
    """Register {module: hook} on outputs, or (`before`) on inputs; `keywords`: hooks are given keyword arguments too."""
    with ExitStack() as stack:
        for module, hook in found.items():
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.enter_context(register(hook, with_kwargs=keywords))
        yield
