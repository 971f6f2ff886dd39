"""Prepared file: safetensors whose tensors are grouped, all outside the blocks first, then block after block.

Every group begins and ends at a multiple of `PAGE` bytes of the file, so that it can be read past the page cache, and every tensor at
a multiple of `ALIGNMENT`; tensors named `pad.N` fill the gaps. The metadata has one JSON text (`Contents`) and a digest of the header.
There is no version: this source is in the cache's key.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn

from runtime.checkpoint.headers import DTYPES, Header, read_header
from runtime.errors import ArtifactError, CompressError
from runtime.formats.checks import TensorSpec
from runtime.layers.compressed_module import PREPARED
from runtime.modeling.skeleton import find_blocks, tied_names

PAGE = 4096
ALIGNMENT = 64
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DIGEST = "0" * 64
_CHUNK = 1 << 20


class UnusableFileError(Exception):
    """A prepared file that is damaged or not what was asked for; the message says why."""


@dataclass
class Group:
    """A range of the file: bytes `begin` to `end`, and their SHA-256."""

    name: str
    begin: int
    end: int
    sha256: str = ""

    @property
    def size(self) -> int:
        """Length of the group in the file, bytes."""
        return self.end - self.begin


@dataclass
class Contents:
    """What the metadata says.

    Attributes:
        key: the cache's key.
        groups: the first is what is outside the blocks, the others are the blocks in order.
        aliases: {parameter: the parameter it is}.
    """

    key: str
    groups: list[Group] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)


class Writer:
    """Writes a prepared file group by group. Used on a new file that is renamed when it is whole, in a `with` block.

    Args:
        stream: of the file.
        key: the cache's.
        room: bytes that the header may take at most.
        behind: write a group while the next is being prepared, which holds two in memory.
    """

    def __init__(self, stream: BinaryIO, key: str, room: int, behind: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1) if behind else None
        self._writing: Future[None] | None = None
        self._stream = stream
        self._contents = Contents(key)
        self._start = -(-room // PAGE) * PAGE
        self._at = self._start
        self._entries: dict[str, Any] = {}
        self._hash = hashlib.sha256()
        stream.seek(self._start)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def add(self, group: str, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
        """The next group."""
        self._wait()
        if self._thread is None:
            self._add(group, tensors, aliases)
        else:
            self._writing = self._thread.submit(self._add, group, dict(tensors), aliases)

    def _wait(self) -> None:
        """Until the last group is written; raises what its writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _add(self, group: str, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> None:
        begin, self._hash = self._at, hashlib.sha256()
        for name, tensor in tensors.items():
            self._pad(ALIGNMENT)
            plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._put(name, _NAMES[tensor.dtype], list(tensor.shape), memoryview(plain.numpy()))  # type: ignore[arg-type]
        self._pad(PAGE)
        self._contents.aliases.update(aliases)
        self._contents.groups.append(Group(group, begin, self._at, self._hash.hexdigest()))
        if self._thread is not None:  # the disk works meanwhile, so that little is left to wait for when all is written
            self._stream.flush()
            os.fdatasync(self._stream.fileno())

    def finish(self) -> None:
        """Write the header."""
        self._wait()
        self._entries["__metadata__"] = {"compress": json.dumps(asdict(self._contents)), "digest": _DIGEST}
        raw = json.dumps(self._entries).encode()
        room = self._start - 8
        if len(raw) > room:
            raise OSError(f"the header of a prepared file has {len(raw)} bytes, {room} were set aside")
        raw = raw.ljust(room)
        digest = hashlib.sha256(raw).hexdigest()
        self._stream.seek(0)
        self._stream.write(room.to_bytes(8, "little") + raw.replace(_DIGEST.encode(), digest.encode(), 1))
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _pad(self, multiple: int) -> None:
        missing = -self._at % multiple
        if missing:
            self._put(f"pad.{self._at}", "U8", [missing], memoryview(bytes(missing)))

    def _put(self, name: str, dtype: str, shape: list[int], content: memoryview) -> None:
        begin = self._at - self._start
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + content.nbytes]}
        self._hash.update(content)
        self._stream.write(content)
        self._at += content.nbytes


class PreparedFile:
    """A prepared file, opened and checked: header, sizes and key. What the tensors hold is checked by `verify`.

    Raises:
        UnusableFileError: the file is missing, damaged, or made for something else.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        try:
            self._header = read_header(path)
            self.contents = _read(self._header)
        except ArtifactError as error:
            raise UnusableFileError(str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnusableFileError(f"{path} is no prepared file") from error
        if self.contents.key != key:
            raise UnusableFileError(f"{path} was made for something else")
        self.groups = self.contents.groups
        self._map: mmap.mmap | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the header: of names, shapes, dtypes and places of the tensors, and of the digests of what they hold."""
        return self._header.metadata["digest"]

    def names(self, group: Group) -> list[str]:
        """The tensors of a group."""
        return [
            name
            for name, entry in self._header.tensors.items()
            if group.begin <= entry.offset < group.end and not name.startswith("pad.")
        ]

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor; UnusableFileError: one is not in a group as a whole."""
        found = {}
        for group in self.groups:
            for name in self.names(group):
                entry = self._header.tensors[name]
                if entry.offset + entry.nbytes > group.end:
                    raise UnusableFileError(f"{self.path} has {name} in two groups")
                found[name] = TensorSpec(tuple(entry.shape), entry.dtype)
        return found

    def verify(self) -> None:
        """Compare every group with its SHA-256; UnusableFileError names the first that differs, OSError: it cannot be read."""
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for group, found in zip(self.groups, pool.map(self._digest, self.groups), strict=True):
                if found != group.sha256:
                    raise UnusableFileError(f"{self.path}: the tensors of {group.name or 'the model'} are damaged")

    def tensors(self, group: Group, buffer: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The group's tensors: views of `buffer`, uint8, which holds the group's bytes, or of the mapped file."""
        result = {}
        for name in self.names(group):
            entry = self._header.tensors[name]
            if buffer is not None:
                value = buffer[entry.offset - group.begin :][: entry.nbytes]
            elif entry.nbytes:  # a storage of its own, so that what a model holds can be counted
                value = torch.frombuffer(self.mapped(), dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
            else:
                value = torch.empty(0, dtype=torch.uint8)
            result[name] = value.view(entry.dtype).view(entry.shape)
        return result

    def mapped(self) -> mmap.mmap:
        """The file as memory: pages are read when they are touched and shared by all processes that map it; writing copies them."""
        if self._map is None:
            with self.path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), self._header.size, access=mmap.ACCESS_COPY)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)  # larger reads on a cold start, fewer page faults
        return self._map

    def forget(self) -> None:
        """Let go of the pages that this process has touched; they are read again when they are needed."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _digest(self, group: Group) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as stream:
            stream.seek(group.begin)
            for start in range(group.begin, group.end, _CHUNK):
                digest.update(stream.read(min(_CHUNK, group.end - start)))
        return digest.hexdigest()


def room_for(names: Iterable[str]) -> int:
    """Bytes that the header of a file takes at most, whose tensors belong to these places of a model (8 a module and more)."""
    return 65536 + sum(6 * (len(name) + 160) for name in names)


def _read(header: Header) -> Contents:
    digest = header.metadata["digest"]
    if hashlib.sha256(header.raw.replace(digest.encode(), _DIGEST.encode(), 1)).hexdigest() != digest:
        raise ArtifactError(f"the header of {header.file} is damaged")
    content = json.loads(header.metadata["compress"])
    content["groups"] = [Group(**group) for group in content["groups"]]
    found = Contents(**content)
    at = header.data_start
    for group in found.groups:
        if group.begin != at or group.end < at or group.end % PAGE:
            raise ValueError("groups do not follow one another")
        at = group.end
    if at != header.size:
        raise ValueError("groups do not cover the file")
    return found


# A model's tensors in groups: what is outside the repeated blocks, then each block. Taken out of modules and put back by name.

OUTSIDE = ""  # name of the group of everything that is in no block


@dataclass(frozen=True)
class Groups:
    """Names of the blocks in order (empty: the model has none), and which group a tensor or module belongs to."""

    blocks: tuple[str, ...]

    def all(self) -> list[str]:
        """Names of all groups: tensors outside the blocks first, then each block."""
        return [OUTSIDE, *self.blocks]

    def of(self, name: str) -> str:
        """The group of a parameter, buffer or module."""
        if not self.blocks:
            return OUTSIDE
        prefix = self.blocks[0].rpartition(".")[0] + "."
        if not name.startswith(prefix):
            return OUTSIDE
        block = prefix + name[len(prefix) :].partition(".")[0]
        return block if block in self.blocks else OUTSIDE


def groups_of(model: Any) -> Groups:
    """The groups of a transformers model; no blocks where one of their tensors is tied to another tensor."""
    try:
        name, blocks = find_blocks(model)
    except CompressError:
        return Groups(())
    groups = Groups(tuple(f"{name}.{i}" for i in range(len(blocks))))
    ties = tied_names(model)
    return Groups(()) if any(groups.of(tied) != OUTSIDE for tied in [*ties, *ties.values()]) else groups


class Place(NamedTuple):
    """One parameter or buffer of a module, in `store[leaf]`."""

    name: str
    store: dict[str, Any]
    leaf: str

    @property
    def value(self) -> torch.Tensor:
        """The tensor at this place."""
        return self.store[self.leaf]


def places(model: nn.Module) -> Iterator[Place]:
    """Every parameter and buffer that a prepared file holds: all but buffers that are computed. Shared modules come once."""
    for prefix, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for leaf, value in store.items():
                computed = leaf in module._non_persistent_buffers_set and not leaf.startswith(PREPARED)
                if value is not None and not computed:
                    yield Place(f"{prefix}.{leaf}" if prefix else leaf, store, leaf)


def values(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    """What modules hold when they have these tensors, by place. Those of a kernel's own layout are not listed by `state_dict`."""
    found: list[tuple[Place, torch.Tensor]] = []
    for name, value in tensors.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if leaf in owner._parameters:
            found.append((Place(name, owner._parameters, leaf), nn.Parameter(value, requires_grad=False)))
            continue
        if leaf.startswith(PREPARED):
            owner._non_persistent_buffers_set.add(leaf)
        found.append((Place(name, owner._buffers, leaf), value))
    return found


def put(found: Iterable[tuple[Place, torch.Tensor]]) -> None:
    """Give modules their `values`."""
    for place, value in found:
        place.store[place.leaf] = value


def share(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Make each named parameter the one it is an alias of."""
    for name, source in aliases.items():
        owner_name, _, leaf = name.rpartition(".")
        model.get_submodule(owner_name)._parameters[leaf] = model.get_parameter(source)
