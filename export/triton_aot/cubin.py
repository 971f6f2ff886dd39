"""What a cubin says of itself: architecture, kernels, their arguments. Read from its bytes, without a GPU or NVIDIA's tools.

Layout: ELF (64 bits, little endian) of machine 190. The architecture is in the header's flags, as LLVM's `BinaryFormat/ELF.h` names
them (`EF_CUDA_SM`, `EF_CUDA_ACCELERATORS`; their places depend on the ABI version). Section `.nv.info.NAME` is a list of
attributes, of which `EIATTR_KPARAM_INFO` (0x17) tells number, offset and size of one argument, as `cuobjdump -elf` prints it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from runtime.errors import CompressError

MACHINE = 190  # EM_CUDA
_FUNCTION = 2  # STT_FUNC
_KPARAM_INFO = 0x17
_WITH_SIZE = 4  # EIFMT_SVAL: two bytes of size and so many of value; other formats have two bytes of value


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel: place in the list, byte offset and size."""

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True)
class Image:
    """A cubin.

    Attributes:
        architecture: "sm_80", "sm_90a", ...
        kernels: {kernel: its arguments in order}.
    """

    architecture: str
    kernels: dict[str, tuple[Parameter, ...]]


def read(data: bytes, where: str) -> Image:
    """Read a cubin; CompressError, naming `where`, when it is none."""
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError) as error:
        raise CompressError(f"{where} is no cubin: {error}") from error


def _read(data: bytes) -> Image:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no little-endian ELF file of 64 bits")
    version = data[8]  # of the ABI
    machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    if machine != MACHINE:
        raise ValueError(f"it is for machine {machine}, not for a GPU of NVIDIA")
    sections = _sections(data)
    kernels = {}
    for name in _functions(data, sections):
        info = sections.get(f".nv.info.{name}")
        # Other functions, which the compiler adds for the tensor memory of sm_100, lie in the section of the kernel.
        if info is not None and f".text.{name}" in sections:
            kernels[name] = _parameters(data[info[0] : info[0] + info[1]])
    if not kernels:
        raise ValueError("it has no kernel")
    return Image(_architecture(version, flags), kernels)


def _architecture(version: int, flags: int) -> str:
    number, own = (flags & 0xFF, flags & 0x800) if version < 8 else (flags >> 8 & 0xFF, flags & 0x8)
    return f"sm_{number}{'a' if own else ''}"


def _sections(data: bytes) -> dict[str, tuple[int, int]]:
    """{section: offset and size}."""
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count, strings = struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    start = heads[strings][4]
    return {_text(data, start + name): (offset, length) for name, _, _, _, offset, length in heads}


def _functions(data: bytes, sections: dict[str, tuple[int, int]]) -> list[str]:
    """Names of the functions in the symbol table."""
    offset, length = sections.get(".symtab", (0, 0))
    strings = sections.get(".strtab", (0, 0))[0]
    found = []
    for at in range(offset, offset + length, 24):
        name, info = struct.unpack_from("<IB", data, at)
        if info & 0xF == _FUNCTION:
            found.append(_text(data, strings + name))
    return found


def _parameters(info: bytes) -> tuple[Parameter, ...]:
    found, at = [], 0
    while at + 4 <= len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != _WITH_SIZE:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, bits = struct.unpack_from("<IHHI", info, at)
            found.append(Parameter(ordinal, offset, bits >> 18))
        at += size
    return tuple(sorted(found, key=lambda parameter: parameter.ordinal))


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
