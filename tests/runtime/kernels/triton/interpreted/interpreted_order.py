"""The interpreter notices kernels whose programs are not independent, or that reach too far."""

import pytest
import torch

from runtime.kernels.triton.jit import entry, tl


@entry
def shift_kernel(x, out, width, step, offset, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    value = tl.load(x + row * width + at + offset, mask=at < width, other=0.0)
    tl.store(out + row * step + at, value, mask=at < width)


@entry
def turn_kernel(out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(1) * BLOCK + at, at, mask=at < BLOCK)


def shift(x, out, width=5, step=5, offset=0):
    shift_kernel[(4,)](x, out, width, step, offset, BLOCK=8)


def test_independent_programs_run():
    x, out = torch.randn(4, 5), torch.empty(4, 5)
    assert out.isnan().all(), "what was never written would be noticed"
    shift(x, out)
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 4}, "two programs of shift_kernel store to one address"), ({"offset": 1}, "outside"), ({"offset": -1}, "outside"),
        ({"step": 6}, "outside"),
    ],
)  # fmt: skip
def test_what_depends_on_the_order_fails(options, said):
    from triton.runtime.errors import InterpreterError

    with pytest.raises((AssertionError, InterpreterError), match=said):
        shift(torch.randn(4, 5), torch.empty(4, 5), **options)


def test_what_is_loaded_and_stored_fails():
    x = torch.randn(4, 5)
    with pytest.raises(AssertionError, match="shift_kernel loads what it stores"):
        shift(x, x)


def test_programs_come_in_another_order_each_time(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    orders = []
    touch = InterpreterBuilder.create_masked_store

    def store(self, pointers, *others):
        orders[-1].append(self.grid_idx)
        return touch(self, pointers, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", store)
    for _ in range(4):
        orders.append([])
        turn_kernel[(1, 6)](torch.empty(48), BLOCK=8)
        assert sorted(orders[-1]) == [(0, y, 0) for y in range(6)]
    assert len(set(map(tuple, orders))) > 1
