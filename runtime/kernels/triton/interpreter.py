"""Triton's interpreter beside numpy 2.4: a loop bound that is a tensor no longer converts to a number there."""

from __future__ import annotations

from typing import Any


def repair() -> None:
    """Let loops in interpreted kernels run with any numpy. For tests; does nothing to compiled kernels.

    The interpreter holds scalars as arrays of shape [1], which numpy 2.4 refuses to turn into an int (triton 3.6 still tries).
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "repaired", False):
        return

    def patch(tensor: Any, *scope: Any) -> None:  # triton 3.5 patches for good, 3.6 for the time of a launch
        original(tensor, *scope)
        assign = scope[0].set_attr if scope else setattr
        assign(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.repaired = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
