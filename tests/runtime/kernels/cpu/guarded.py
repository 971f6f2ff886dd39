"""Runs products whose tensors lie directly before memory that may not be touched; a wrong access kills the process.

`python guarded.py [library ...]`: all instruction sets of this machine, and those libraries.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import products
import torch
from weight_cases import int_scheme

from runtime.formats.dfloat11 import DFloat11
from runtime.formats.scheme import Scheme
from runtime.formats.ternary_dictionary import TernaryDictionary
from runtime.kernels.cpu import library
from runtime.kernels.cpu.integer import CKernel
from runtime.kernels.cpu.panels import PANEL
from runtime.system import instruction_sets

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_kept: list[mmap.mmap] = []


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy between two pages that may not be touched, its end at the second."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    if not size:
        return tensor
    room = -(-size // page) * page
    region = mmap.mmap(-1, room + 2 * page)
    _kept.append(region)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for address in (start, start + page + room):
        if _libc.mprotect(address, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    held = (ctypes.c_char * size).from_address(start + page + room - size)
    copy = torch.frombuffer(held, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy


def check(native: ctypes.CDLL, kind: str, scheme: object, shape: tuple[int, int], dtype: torch.dtype) -> None:
    storage = (
        None if kind in ("e2m1", "k", "t", "c") else {None: "packed", "2:4": "sparse24"}.get(scheme.sparsity, "bitmap")
    )
    made = products.case(kind, scheme, shape, dtype, storage=storage)
    x = torch.randn(21, shape[1]).to(dtype)
    for digits in (1, 2, 3):
        expected = products.run(native, made, x, digits)
        made.prepared = {name: guarded(tensor) for name, tensor in made.prepared.items()}
        bias, tight = guarded(torch.zeros(shape[0])), guarded(x)
        linear = products.in_digits(made, digits, bias)
        for rows in (1, 3, 9, 21):
            y = guarded(torch.zeros(rows, shape[0], dtype=dtype))
            memory = guarded(torch.zeros(native.linear_memory(ctypes.byref(linear), rows), dtype=torch.uint8))
            kinds = library.TYPES[dtype]
            own = tight if rows == 21 else guarded(x[:rows])
            native.linear_run(
                ctypes.byref(linear), own.data_ptr(), kinds, rows, y.data_ptr(), kinds, memory.data_ptr(), 1
            )
            assert torch.equal(y, expected[:rows])
    tile = guarded(torch.zeros(shape[1], shape[0], dtype=dtype))
    native.linear_dequantize(ctypes.byref(linear), 0, -(-shape[0] // PANEL), tile.data_ptr(), library.TYPES[dtype], 1)


def check_dense(native: ctypes.CDLL, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, x = guarded(torch.randn(shape).to(dtype)), guarded(torch.randn(shape[0])), torch.randn(41, shape[1])
    check_rows(native, products.dense(weight, bias), x, dtype)


def check_as_stored(native: ctypes.CDLL, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer, _ = products.linear(scheme, shape, dtype)
    kernel = layer.prepare().decode
    assert isinstance(kernel, CKernel)
    tensors = {name: guarded(tensor) for name, tensor in layer._tensors().items()}
    check_rows(
        native, kernel.linear(tensors, layer.layer, guarded(torch.randn(shape[0]))), torch.randn(41, shape[1]), dtype
    )


def check_rows(native: ctypes.CDLL, linear: library.Linear, x: torch.Tensor, dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 9, 13, 25, 41):
        own, y = guarded(x[:rows].to(dtype)), guarded(torch.zeros(rows, linear.rows, dtype=dtype))
        memory = guarded(torch.zeros(native.linear_memory(ctypes.byref(linear), rows), dtype=torch.uint8))
        kind = library.TYPES[dtype]
        native.linear_run(ctypes.byref(linear), own.data_ptr(), kind, rows, y.data_ptr(), kind, memory.data_ptr(), 1)
        assert torch.equal(y, products.multiply(native, linear, x[:rows].to(dtype)))


def main() -> None:
    torch.set_num_threads(1)
    libraries = [library.load(name) for name in instruction_sets.available()]
    for path in sys.argv[1:]:
        libraries.append(ctypes.CDLL(path))
        library.declare(libraries[-1])
    done = 0
    for native in libraries:
        for shape in ((1, 1), (16, 32), (17, 257), (33, 100), (33, 96), (33, 256)):
            for kind, scheme in (
                ("w4", int_scheme(4, False, 16)), ("w4", int_scheme(4, True, "channel")), ("w8", int_scheme(8, False, 16)),
                ("w8", int_scheme(8, True, "tensor")), ("w4", int_scheme(3, True, 16)), ("w8", int_scheme(7, False, 16)),
                ("s24", int_scheme(4, True, "channel", "2:4")),
                ("s24", int_scheme(4, True, 32, "2:4")), ("w4", int_scheme(4, False, 16, "block:32x16")),
                ("w8", int_scheme(5, True, 32, "block:32x32")), *(("e2m1", scheme) for scheme in products.FLOATS.values()),
                *(("k", scheme) for scheme in products.K_QUANTS.values()),
                *(("t", scheme) for scheme in products.TRELLISES), *(("c", scheme) for scheme in products.ROW_CODEBOOKS),
            ):  # fmt: skip
                if shape[1] % {
                    "e2m1": 32,
                    "k": 256,
                    "t": scheme.weights.group_size,
                    "c": scheme.weights.group_size or 1,
                }.get(kind, 1):
                    continue
                if (scheme.weights.group_size or 1) > shape[1] or (scheme.sparsity and shape[1] % 4):
                    continue
                for dtype in (torch.bfloat16, torch.float32):
                    check(native, kind, scheme, shape, dtype)
                    done += 1
                _kept.clear()
            for dtype in (torch.bfloat16, torch.float32):
                check_dense(native, shape, dtype)
                forms = [products.MXFP8] if shape[1] % 32 == 0 else []
                forms += [each for size, own in products.ROUNDED.items() if shape[1] % size == 0 for each in own]
                forms += [*map(Scheme, (*map(DFloat11, (2, 3, 4)), TernaryDictionary(), TernaryDictionary(0.4)))]
                for form in forms:
                    check_as_stored(native, form, shape, dtype)
                done += 1
            _kept.clear()
    print(done, "cases")


if __name__ == "__main__":
    main()
