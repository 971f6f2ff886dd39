"""Triton's interpreter as the tests need it. Never used where kernels are compiled.

What is wrong in triton 3.6 to 3.9 beside numpy 2.4, each seen in a test: a loop bound that is a tensor does not convert to a number;
products of bfloat16 matrices multiply the bit patterns; conversion to bfloat16 and float8 rounds ties away and loses the carry
into the exponent; a truth value of a scalar is an integer once it is spread over a block, which 3.9 does not take as a mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def repair() -> None:
    """Make interpreted kernels compute what compiled ones do. Once a process; needs `TRITON_INTERPRET=1` to matter."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    if getattr(builder, "repaired", False):
        return
    custom = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def decoded(data: Any, dtype: Any) -> Any:
        if dtype not in custom:
            return data
        signed = np.int16 if dtype == tl.bfloat16 else np.int8
        bits = torch.from_numpy(np.ascontiguousarray(data).view(signed))
        return bits.view(custom[dtype]).float().numpy()

    def cast(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
        to, data = dst_type.scalar, decoded(src.data, src.dtype.scalar)
        if to not in custom:
            return handle(data.astype(interpreter._get_np_dtype(dst_type)), to)
        value = torch.from_numpy(np.ascontiguousarray(data.astype(np.float32))).to(custom[to])
        signed, unsigned = (torch.int16, np.uint16) if to == tl.bfloat16 else (torch.int8, np.uint8)
        return handle(value.view(signed).numpy().view(unsigned), to)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right = decoded(a.data, a.dtype.scalar), decoded(b.data, b.dtype.scalar)
        return handle(np.matmul(left.astype(d.data.dtype), right.astype(d.data.dtype)) + d.data, d.dtype.scalar)

    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        return masked_load(self, pointers, handle(mask.data.astype(bool), tl.int1), *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return masked_store(self, pointers, value, handle(mask.data.astype(bool), tl.int1), *others)

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # for the time of a launch
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    builder.create_masked_load, builder.create_masked_store = load, store
    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot, builder.repaired = cast, cast, dot, True
