"""What the CPU is said to be able to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.system import processes


@pytest.mark.parametrize(
    ("flags", "bfloat16", "float16"),
    [
        ({"avx2", "fma"}, False, False),
        ({"avx512f", "avx512_vnni"}, False, False),  # bfloat16 is emulated there
        ({"avx512_bf16"}, True, False),
        ({"amx_bf16", "amx_fp16"}, True, True),
        ({"asimd", "bf16", "asimdhp"}, True, False),
        (set(), False, False),
    ],
)
def test_products_in_16_bits(flags, bfloat16, float16, monkeypatch):
    monkeypatch.setattr(processes, "flags", lambda: frozenset(flags))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert processes.multiplies(torch.bfloat16) == bfloat16
    assert processes.multiplies(torch.float16) == float16
    assert processes.multiplies(torch.float32)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not processes.multiplies(torch.bfloat16)
    assert processes.multiplies(torch.float32)


def test_facts_are_distinct_lines_in_order(monkeypatch):
    text = "model name\t: A\nflags\t\t: avx2 fma\nmodel name\t: A\nflags\t\t: avx2 fma\nbogomips: 1\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    assert processes.facts("flags", "model name") == ["model name\t: A", "flags\t\t: avx2 fma"]
    assert processes.flags.__wrapped__() == {"avx2", "fma"}


def test_nothing_is_known_without_cpuinfo(monkeypatch):
    def missing(self, **_):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert processes.flags.__wrapped__() == frozenset()
    assert processes.identity.__wrapped__()
