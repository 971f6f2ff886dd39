"""Calls of a C library as data: the memory that each reads, before and after, for a program in C that repeats them."""

from __future__ import annotations

import bisect
import ctypes
import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

_UNTOUCHED = 0xFF  # what is left so of scratch memory is NaN to whoever reads it as floats


class Memory:
    """What tensors and ctypes objects made since `Recorder` began hold, by address."""

    def __init__(self) -> None:
        spans: dict[tuple[int, int], bool] = {}
        for each in gc.get_objects():
            kind = type(each)
            if issubclass(kind, ctypes.Structure | ctypes.Array):
                spans[ctypes.addressof(each), ctypes.sizeof(each)] = True
            elif issubclass(kind, torch.Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                spans.setdefault((storage.data_ptr(), storage.nbytes()), False)
                if each.is_contiguous():
                    spans.setdefault((each.data_ptr(), each.nbytes), False)
        self._spans = sorted((start, size, points) for (start, size), points in spans.items() if start and size)
        self._starts = [start for start, _, _ in self._spans]
        self._longest = max((size for _, size, _ in self._spans), default=0)

    def find(self, address: int) -> tuple[int, int, bool] | None:
        """Start and size of what begins at an address, or else holds it: the largest; and whether there are pointers in it."""
        found = None
        for start, size, points in reversed(self._spans[: bisect.bisect_right(self._starts, address)]):
            if start != address and found is not None and found[0] == address:
                break
            if start + self._longest <= address:
                break
            if start + size > address and (found is None or size > found[1]):
                found = (start, size, points)
        return found


class Recorder:
    """Writes every call of a library's functions without results, as it is made, to a file; see `replay.c`.

    Attributes:
        count: calls so far. label: what the next ones are.
    """

    def __init__(self, library: ctypes.CDLL, names: list[str], file: BinaryIO) -> None:
        self.count, self.label = 0, ""
        self.functions = {name: getattr(library, name) for name in names}
        self._file, self._scratch, self._known = file, dict[int, torch.Tensor](), dict[bytes, int]()

    def scratch(self, count: int) -> torch.Tensor:
        """Working memory of exactly so many bytes for the next call: its contents mean nothing, neither before nor after."""
        memory = torch.full((max(count, 1),), _UNTOUCHED, dtype=torch.uint8)
        self._scratch[memory.data_ptr()] = memory
        return memory

    def call(self, name: str, *arguments: Any) -> None:
        """As the library's function."""
        numbers = [_number(each) for each in arguments]
        blocks, links = _reached(numbers, self.functions[name].argtypes)
        before = [ctypes.string_at(start, size) for start, size in blocks]
        self.functions[name](*arguments)
        label = f"{self.label}: {name}".encode()
        self._write(list(self.functions).index(name), len(label), len(numbers), len(blocks))
        self._file.write(label)
        for position, number in enumerate(numbers):
            self._write(number, *links.get((-1, position * 8), (-1, 0)))
        for index, (start, size) in enumerate(blocks):
            own = [(at, *target) for (block, at), target in links.items() if block == index]
            scratch = start in self._scratch
            self._write(size, scratch, len(own))
            for link in own:
                self._write(*link)
            if not scratch:
                self._write_contents(before[index])
            if not scratch and not own:
                self._write_contents(ctypes.string_at(start, size))
        self._scratch.clear()
        self.count += 1

    def _write(self, *numbers: int) -> None:
        self._file.write(struct.pack(f"<{len(numbers)}q", *numbers))

    def _write_contents(self, contents: bytes) -> None:
        """The number of such bytes, and they themselves the first time."""
        count = len(self._known)
        number = self._known.setdefault(contents, count)
        self._write(number)
        if number == count:
            self._file.write(contents)

    def dispatch(self) -> str:
        """C that makes the call of a number, with an array of arguments."""
        lines = []
        for number, (name, function) in enumerate(self.functions.items()):
            kinds = {ctypes.c_void_p: "void *", ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t"}
            given = ", ".join(f"({kinds[kind]})a[{place}]" for place, kind in enumerate(function.argtypes))
            lines.append(f"case {number}: {name}({given}); break;")
        return "\n".join(
            ("static void call(int64_t function, const int64_t *a) {", "switch (function) {", *lines, "}}", "")
        )


def _number(argument: Any) -> int:
    if argument is None or isinstance(argument, int):
        return argument or 0
    if isinstance(argument, ctypes.Array | ctypes.Structure):
        return ctypes.addressof(argument)
    return ctypes.addressof(argument._obj)  # of byref


def _reached(
    numbers: list[int], kinds: list[Any]
) -> tuple[list[tuple[int, int]], dict[tuple[int, int], tuple[int, int]]]:
    """Blocks that can be reached from arguments; and by block (-1: the arguments) and offset, the block and offset that it points to."""
    memory, spans = Memory(), dict[tuple[int, int], None]()
    found: dict[tuple[int, int], int] = {}  # of links, -1 and the offset or 0 and the address
    pending = [(-1, place * 8, number) for place, number in enumerate(numbers) if kinds[place] is ctypes.c_void_p]
    while pending:
        source, at, number = pending.pop()
        target = memory.find(number)
        if target is None:
            if source < 0 and number:
                raise AssertionError(f"argument {at // 8} points to what no tensor holds")
            continue
        start, size, points = target
        if (start, size) not in spans:
            spans[start, size] = None
            if points:
                words = struct.unpack_from(f"<{size // 8}q", ctypes.string_at(start, size))
                pending += [(0, start + place * 8, word) for place, word in enumerate(words) if word]
        found[source, at] = number
    # A layer's pages lie in those of all layers: memory is there once.
    whole = [
        (start, size)
        for start, size in spans
        if not any(other <= start and start + size <= other + more and more > size for other, more in spans)
    ]

    def place_of(address: int) -> tuple[int, int]:
        index = next(i for i, (start, size) in enumerate(whole) if start <= address < start + size)
        return index, address - whole[index][0]

    links = {(key if key[0] < 0 else place_of(key[1])): place_of(number) for key, number in found.items()}
    return whole, links


@contextmanager
def recorded(library: ctypes.CDLL, names: list[str], path: Path) -> Iterator[Recorder]:
    """Calls of these functions are recorded; what they point to must be made inside."""
    gc.collect()
    gc.freeze()  # objects from before are not searched
    with path.open("wb") as file:
        recorder = Recorder(library, names, file)

        def recording(name: str) -> Callable[..., None]:
            return lambda *arguments: recorder.call(name, *arguments)

        for name in names:
            setattr(library, name, recording(name))
        try:
            yield recorder
        finally:
            for name, function in recorder.functions.items():
                setattr(library, name, function)
            gc.unfreeze()
