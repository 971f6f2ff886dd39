"""Triton's interpreter as the tests need it. Never used where kernels are compiled.

What is wrong in Triton 3.6 to 3.9 beside numpy 2.4, each seen in a test: products of bfloat16 matrices multiply the bit patterns;
conversion to bfloat16 and float8 rounds ties away and loses the carry into the exponent; scales of scaled products are powers of two,
whatever their type; a truth value of a scalar is an integer once
it is spread over a block, which 3.9 does not take as a mask; in 3.6 a loop bound that is a tensor does not convert to a number,
and a format of scaled products is no constant.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch


class _Name(str):
    """A format of scaled products, as a constant of Triton 3.6 and as a string of later ones."""

    @property
    def value(self) -> str:
        return str(self)


def repair() -> None:
    """Make interpreted kernels compute what compiled ones do. Once a process; needs `TRITON_INTERPRET=1` to matter."""
    import triton.language as tl
    from triton.runtime import interpreter

    from runtime.formats.block_float import HALVES

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
        kind = np.float64 if _Sums.wide and d.data.dtype == np.float32 else d.data.dtype
        left, right = decoded(a.data, a.dtype.scalar), decoded(b.data, b.dtype.scalar)
        product = np.matmul(left.astype(kind), right.astype(kind)).astype(d.data.dtype)
        return handle(product + d.data, d.dtype.scalar)

    def scaled(values: Any, scale: Any, kind: Any) -> Any:
        """Operand `[rows, K]` of a scaled product, out of bytes and a scale for each block of a row."""
        data = values.data.view(np.uint8)
        if kind == interpreter._ir.ScaleDotElemTypeTY.E2M1:
            halves = HALVES.numpy().astype(np.float32)
            found = np.stack((halves[data & 15], halves[data >> 4]), -1).reshape(len(data), -1) / 2
        else:
            found = decoded(data, tl.float8e4nv)
        if scale.dtype.scalar == tl.float8e4nv:
            factor = decoded(scale.data & 127, tl.float8e4nv)  # tensor cores have no sign here
        else:
            exponent = scale.data.astype(np.int32)
            factor = np.where(exponent == 255, np.nan, np.ldexp(np.float32(1), np.minimum(exponent, 254) - 127))
        return found * np.repeat(factor, found.shape[1] // factor.shape[1], 1)

    multiply_scaled = interpreter.TritonSemantic.dot_scaled

    def with_names(self: Any, *operands: Any) -> Any:
        return multiply_scaled(self, *(_Name(each) if isinstance(each, str) else each for each in operands))

    def dot_scaled(
        self: Any, a: Any, a_scale: Any, a_kind: Any, b: Any, b_scale: Any, b_kind: Any, *options: Any
    ) -> Any:
        total = options[-1]
        turned = handle(np.ascontiguousarray(b.data.T), b.dtype)
        product = scaled(a, a_scale, a_kind) @ scaled(turned, b_scale, b_kind).T
        return handle((product + total.data).astype(np.float32), total.dtype.scalar)

    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        return masked_load(self, pointers, handle(mask.data.astype(bool), tl.int1), *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        return masked_store(self, pointers, value, handle(mask.data.astype(bool), tl.int1), *others)

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # for the time of a launch
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    # The interpreter replaces the functions of the language at every launch and at every call of a function by a kernel, which takes
    # half of the time: here once.
    patch_language, languages = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        found = {each.__name__ for each in function.__globals__.values() if each is tl or each is tl.core}
        if not found <= languages:
            languages.update(found)
            patch_language(function)
        return interpreter._LangPatchScope()  # of no changes, as these stay

    # Triton builds a block type for every operation, nearly always one of a few: their attributes and NumPy's dtypes are kept.
    attributes: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}
    init, get_dtype = tl.block_type.__init__, interpreter._get_np_dtype

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = get_dtype(dtype)
        return dtypes[dtype.name]

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tl.core._unwrap_shape(shape)
        if any(type(size) is not int for size in sizes):  # 16.0 equals 16, and is refused
            init(self, element_ty, shape)
            return
        key = (type(element_ty), element_ty.name, *sizes)
        if key not in attributes:
            init(self, element_ty, shape)
            attributes[key] = dict(vars(self))
        vars(self).update(attributes[key], element_ty=element_ty)

    tl.block_type.__init__, interpreter._get_np_dtype = init_block_type, np_dtype
    # Overflow checks compute integers again in 64 bits, for an assertion that is off without debug mode.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    interpreter._patch_lang_tensor, interpreter._patch_lang = patched, patch_once
    builder.create_masked_load, builder.create_masked_store = load, store
    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot, builder.repaired = cast, cast, dot, True
    builder.create_dot_scaled, interpreter.TritonSemantic.dot_scaled = dot_scaled, with_names


def watch() -> None:
    """From now on interpreted programs run in a random order, and a launch fails that could tell. Once a process, after `repair`.

    Fails: an address that two programs store to, or that is stored to and loaded in one launch; one outside the tensors of the launch.
    What `torch.empty` gives is NaN, or the largest integer, until it is stored to.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    masked_load, masked_store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
    launches: list[_Launch] = []

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        launches[-1].load(pointers, mask)
        return masked_load(self, pointers, mask, *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        launches[-1].store(pointers, mask)
        return masked_store(self, pointers, value, mask, *others)

    def dimensions(self: Any, *grid: int) -> None:
        launches[-1].shuffle(grid)
        set_grid_dim(self, *grid)

    def index(self: Any, *place: int) -> None:
        set_grid_idx(self, *launches[-1].enter(place))

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(_Launch([each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]))
        try:
            call(self, *args, **kwargs)
            launches[-1].check(self.fn.__name__)
            if _Launch.kept is not None:
                _Launch.kept.append(launches[-1])
        finally:
            launches.pop()

    builder.create_masked_load, builder.create_masked_store = load, store
    builder.set_grid_dim, builder.set_grid_idx, executor.__call__ = dimensions, index, launch
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what is allocated


@contextmanager
def watched() -> Iterator[list[_Launch]]:
    """The launches meanwhile, once `watch` was called."""
    _Launch.kept = found = []
    try:
        yield found
    finally:
        _Launch.kept = None


class _Sums:
    wide: ClassVar[bool] = False


@contextmanager
def wide_sums() -> Iterator[None]:
    """Products are summed in float64 meanwhile: those of a BLAS depend on which row of a block they are in, not so tensor cores'."""
    _Sums.wide = True
    try:
        yield
    finally:
        _Sums.wide = False


class _Launch:
    """What the programs of one launch load and store, by the first byte of each element."""

    kept: ClassVar[list[_Launch] | None] = None
    _orders = random.Random(0)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ranges = sorted(_range(each) for each in tensors if each.numel())
        joined: list[tuple[int, int]] = []
        for start, end in ranges:  # views of one tensor overlap
            if joined and start < joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        self._starts, self._ends = np.array(joined or [(0, 0)], dtype=np.int64).T
        sizes = self._ends - self._starts
        self._firsts = np.cumsum(sizes) - sizes  # of each range in the arrays below
        self._loaded = np.zeros(sizes.sum(), dtype=bool)
        self._stored = np.zeros(sizes.sum(), dtype=np.int32)  # by which program, counted from 1
        self._wrong: str | None = None

    def shuffle(self, grid: Sequence[int]) -> None:
        """The programs of this grid in a new order."""
        self._grid = tuple(grid)
        self._order = list(range(int(np.prod(grid))))
        self._orders.shuffle(self._order)

    def enter(self, place: Sequence[int]) -> tuple[int, ...]:
        """The program whose turn it is."""
        self._program = self._order[int(np.ravel_multi_index(tuple(place), self._grid))]
        return tuple(int(each) for each in np.unravel_index(self._program, self._grid))

    def load(self, pointers: Any, mask: Any) -> None:
        """Note the addresses that are not masked."""
        at = self._places(pointers, mask)
        self._loaded[at] = True
        if self._stored[at].any():
            self._wrong = "{} loads what it stores"

    def store(self, pointers: Any, mask: Any) -> None:
        """As `load`."""
        at = self._places(pointers, mask)
        before = self._stored[at]
        if ((before != 0) & (before != self._program + 1)).any():
            self._wrong = "two programs of {} store to one address"
        elif self._loaded[at].any():
            self._wrong = "{} loads what it stores"
        self._stored[at] = self._program + 1

    def _places(self, pointers: Any, mask: Any) -> Any:
        at = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        which = np.searchsorted(self._starts, at, side="right") - 1
        inside = (which >= 0) & (at + size <= self._ends[which])
        assert inside.all(), f"program {self._program} reaches outside the tensors of its launch"
        return at - self._starts[which] + self._firsts[which]

    def loads(self, tensor: torch.Tensor) -> bool:
        """Whether a program loaded anything of a contiguous tensor."""
        start, end = _range(tensor)
        which = int(np.searchsorted(self._starts, start, side="right")) - 1
        first = start - int(self._starts[which]) + int(self._firsts[which])
        return bool(self._loaded[first : first + end - start].any())

    def check(self, kernel: str) -> None:
        """Whether the order of programs matters."""
        assert self._wrong is None, self._wrong.format(kernel)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte, and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + last) * tensor.element_size()
