"""The layout and the tuning cache, which need neither triton nor a GPU."""

import contextvars
import json
import logging
import math
import random
import subprocess
import sys

import pytest
import torch

from runtime.formats.k_quant import KINDS
from runtime.kernels import tuning as remembered
from runtime.kernels.triton import layout, tuning


@pytest.mark.parametrize("field", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (7, 129), (5, 4096), (2, 0), (0, 64)])
def test_codes_come_back(shape, field):
    low = -(1 << field - 1)
    codes = torch.randint(low, -low, shape, dtype=torch.int8)
    words = layout.pack(codes, field)
    assert words.shape == (-(-shape[1] // layout.tile_columns(field)), shape[0], 16)
    assert torch.equal(layout.unpack(words, field, shape[1]), codes)


def test_place_of_every_code():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 16)  # [2, 256]
    words = layout.pack(codes, 4)
    for column in (0, 1, 15, 16, 127, 128, 255):
        tile, j, word = column // 128, column % 128 // 16, column % 16
        assert int(words[tile, 1, word]) >> 4 * j & 15 == int(codes[1, column]) + 8


@pytest.mark.parametrize(
    ("group", "field", "run"),
    [(0, 4, 8), (128, 4, 8), (256, 4, 8), (64, 4, 4), (48, 4, 1), (96, 4, 2), (16, 4, 1), (128, 8, 4), (32, 8, 2)],
)
def test_slices_per_group(group, field, run):
    assert layout.slices_per_group(group, 32 // field) == run


def test_package_does_not_import_triton():
    code = "import sys; import runtime.kernels.triton.linear; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def device(machine, monkeypatch, tmp_path):
    """A pretended GPU; every time a choice is measured it takes the second candidate."""
    measured = []
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU / 80GB")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "fastest", lambda candidates, launch: measured.append(1) or candidates[1])
    monkeypatch.setattr(remembered, "remembered", {})
    monkeypatch.setattr(tuning, "settled", {})
    with remembered.measuring(math.inf):
        yield measured, tmp_path / "tuning" / "A-GPU-80GB.json"


class Input:
    device, dtype = torch.device("cuda", 0), torch.bfloat16


def choose(candidates=({"a": 1}, {"a": 2}), shape=(4, 8)):
    return tuning.choose("kernel", shape, Input(), candidates, lambda config: None)


def test_choice_is_measured_once_and_remembered(device, monkeypatch):
    measured, path = device
    assert choose() == {"a": 2}
    assert choose() == {"a": 2}
    assert json.loads(path.read_text())["choices"] == {"kernel 4x8 bfloat16": {"a": 2}}
    monkeypatch.setattr(remembered, "remembered", {})  # another process
    monkeypatch.setattr(tuning, "settled", {})
    assert choose() == {"a": 2}
    assert len(measured) == 1
    assert not list(path.parent.glob("*.tmp"))


def test_remembered_choice_that_is_no_candidate_is_measured_again(device):
    measured, path = device
    path.parent.mkdir(parents=True)
    path.write_text('{"version": 1, "choices": {"kernel 4x8 bfloat16": {"old": 7}}}')
    assert choose() == {"a": 2}
    assert len(measured) == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"k": 3}', '{"version": 1, "choices": {"k": 3}}', "\x00"])
def test_damaged_file_is_ignored_and_replaced(device, content, caplog):
    _, path = device
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert choose() == {"a": 2}
    assert "ignoring the tuning file" in caplog.text
    assert json.loads(path.read_text())["choices"] == {"kernel 4x8 bfloat16": {"a": 2}}


def test_defaults_while_a_graph_is_captured_or_nobody_waits_for_measuring(device, monkeypatch):
    measured, path = device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose() == {"a": 1}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def in_a_request():
        return contextvars.Context().run(choose)

    assert in_a_request() == in_a_request() == {"a": 1}
    assert not measured
    assert not path.exists()
    assert choose() == {"a": 2}
    assert in_a_request() == {"a": 2}, "what was measured since"
    assert len(measured) == 1


def test_unwritable_cache_is_said_once(device, monkeypatch, caplog):
    _, path = device
    path.parent.parent.joinpath("tuning").write_text("a file where the folder should be")
    monkeypatch.setattr(remembered, "complained", set())
    with caplog.at_level(logging.WARNING):
        assert choose() == {"a": 2}
        assert choose(shape=(1,)) == {"a": 2}
    assert caplog.text.count("cannot remember") == 1


def prmt(low: int, high: int, selector: int) -> int:
    """PTX's `prmt.b32`: four bytes out of eight, selected by nibbles; their highest bit repeats the byte's sign instead."""
    every = (low | high << 32).to_bytes(8, "little")
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = every[nibble & 7]
        found |= (0xFF * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return found


def run_ptx(program: str, arguments: list[int]) -> int:
    """What a few instructions make of words $1, $2, ...: the word $0."""
    held = {f"${i + 1}": word for i, word in enumerate(arguments)}
    for line in program.strip("{}").splitlines():
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name in ("", ".reg"):
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [held[each] if each in held else int(each, 0) for each in sources]
        if name == "and.b32":
            held[target] = values[0] & values[1]
        elif name == "shr.b32":
            held[target] = values[0] >> values[1]
        elif name == "lop3.b32":
            assert values[3] == (0xF0 & 0xCC) | 0xAA, "(a & b) | c"
            held[target] = (values[0] & values[1]) | values[2]
        else:
            assert name == "prmt.b32"
            held[target] = prmt(*values)
    return held["$0"]


def test_assembly_that_looks_entries_up() -> None:
    """The instructions as PTX defines them: the interpreter does not run them, and compiling does not show what they compute."""
    from runtime.kernels.triton import tables

    look_up, first, second = (
        getattr(each, "value", each) for each in (tables.LOOK_UP, tables.FIRST_PAIR, tables.SECOND_PAIR)
    )
    generator = random.Random(0)
    for trial in range(300):
        entries = [generator.randrange(256) for _ in range(16)]
        word = generator.randrange(1 << 32) if trial >= 16 else trial * 0x11111111
        table = [int.from_bytes(bytes(entries[4 * i : 4 * i + 4]), "little") for i in range(4)]
        found = run_ptx(look_up, [word, *table])
        assert [found >> 8 * i & 255 for i in range(4)] == [entries[word >> 4 * i & 15] for i in range(4)]
        low, high = (list(found.to_bytes(4, "little")), list(word.to_bytes(4, "little")))
        for program, at in ((first, 0), (second, 2)):
            pair = run_ptx(program, [found, word]).to_bytes(4, "little")
            assert list(pair) == [low[at], high[at], low[at + 1], high[at + 1]]


def test_a_choice_of_launches_depends_on_how_scales_are_held() -> None:
    words, table = torch.empty(2, 4, 16, dtype=torch.int32), torch.empty(4, 4, dtype=torch.int32)
    grids, products = torch.empty(16, 4, dtype=torch.float16), torch.empty(17, 4, dtype=torch.int16)
    every = [
        layout.Weight(words, grids, None, (4, 256), 16, 4),
        layout.Weight(words, products, None, (4, 256), 16, 4),
        layout.Weight(words, products, None, (4, 256), 16, 4, codes="minimum"),
        layout.Weight(words, grids, None, (4, 256), 16, 4, codes="table", table=table),
        layout.Weight(words, products, None, (4, 256), 16, 4, codes="table", table=table),
    ]
    assert len({weight.key for weight in every}) == len(every)


def test_blocks_of_k_quants_are_those_of_the_layout() -> None:
    assert {kind.block for kind in KINDS.values() if (kind.low, kind.high) != (1, 1)} == {layout.BLOCK}
