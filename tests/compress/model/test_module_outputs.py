"""Submodules whose layers are solved: computed once for each batch, and the same bits as if they were computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from compress.model.module_outputs import ModuleOutputs


class _Inner(nn.Module):
    """One layer and what surrounds it; counts its runs. `form`: of its output."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.layer, self.form, self.runs = nn.Linear(6, 6), form, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.runs += 1
        y = self.layer(x).tanh()
        return {"tensor": y, "tuple": (y, None), "pair": (y, y), "list": [y]}[self.form]


class _Block(nn.Module):
    def __init__(self, form: str = "tensor", calls: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.calls = _Inner(form), _Inner(), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            y = self.first(x)
            y = y if isinstance(y, torch.Tensor) else y[0]
            x = x + y.mul_(2)  # what a module gives may be changed in place
        return x + self.second(x)


def _opened(block: _Block, batches: list[torch.Tensor], keep: bool = True) -> tuple[ModuleOutputs, Any]:
    finished = ModuleOutputs(block, len(batches), keep)
    with finished.watched(), torch.no_grad():
        block(batches[0][:1])
    return finished, finished.around([(partial(block, x), None) for x in batches], range(len(batches)))


@pytest.mark.parametrize("form", ["tensor", "tuple"])
@torch.no_grad()
def test_a_finished_module_runs_once_a_batch(form: str) -> None:
    block, batches = _Block(form), [torch.randn(rows, 5, 6) for rows in (3, 3, 2)]  # the last is shorter
    wanted = [block(x) for x in batches]
    finished, runs = _opened(block, batches)
    finished.settle({"first.layer", "second.layer"})
    block.first.runs = block.second.runs = 0
    assert all(torch.equal(run(), y) for (run, _), y in zip(runs, wanted, strict=True))
    assert (block.first.runs, block.second.runs) == (3, 3)  # neither is finished
    finished.settle({"second.layer"})
    for _ in range(3):
        assert all(torch.equal(run(), y) for (run, _), y in zip(runs, wanted, strict=True))
    assert (block.first.runs, block.second.runs) == (6, 12)
    with finished.reused(2):
        assert torch.equal(block(batches[2]), wanted[2])
    assert block.first.runs == 6
    assert torch.equal(block(batches[2]), wanted[2])  # outside, all run
    assert block.first.runs == 7
    finished.settle({"first.layer", "second.layer"})  # what was known is forgotten
    runs[0][0]()
    assert block.first.runs == 8


@pytest.mark.parametrize("block", [_Block("pair"), _Block("list"), _Block(calls=2)], ids=["pair", "list", "twice"])
@torch.no_grad()
def test_modules_that_do_not_count(block: _Block) -> None:
    batches = [torch.randn(2, 5, 6)]
    wanted = block(batches[0])
    finished, ((run, _),) = _opened(block, batches)
    finished.settle({"second.layer"})
    run()
    block.first.runs = 0
    assert torch.equal(run(), wanted)
    assert block.first.runs == block.calls


@torch.no_grad()
def test_a_pass_to_the_end_remembers_nothing() -> None:
    """What comes after an unsolved layer changes with it, although no layer inside is unsolved."""
    block, batches = _Block(), [torch.randn(2, 5, 6)]
    finished, ((run, _),) = _opened(block, batches)
    finished.settle({"first.layer"}, stops=False)
    run()
    block.first.layer.weight.mul_(2)
    finished.settle(set())
    assert torch.equal(run(), block(batches[0]))


@torch.no_grad()
def test_nothing_is_remembered_where_states_spill() -> None:
    block, batches = _Block(), [torch.randn(2, 5, 6)]
    finished, ((run, _),) = _opened(block, batches, keep=False)
    finished.settle(set())
    run()
    block.first.runs = 0
    run()
    assert block.first.runs == 1


class _Attention(nn.Module):
    """What it gives is what its last layer gives; `narrow`: that layer reads less than it gives, or more."""

    def __init__(self, narrow: bool = True) -> None:
        super().__init__()
        inner = 4 if narrow else 12
        self.first, self.last, self.runs = nn.Linear(6, inner), nn.Linear(inner, 6), 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.runs += 1
        return self.last(self.first(x).tanh()), None


@pytest.mark.parametrize("narrow", [True, False])
@torch.no_grad()
def test_the_last_layer_alone_runs_once_it_is_solved(narrow: bool) -> None:
    block, batches = _Block(), [torch.randn(rows, 5, 6) for rows in (3, 2, 3)]
    block.first = _Attention(narrow)  # type: ignore[assignment]
    finished, runs = _opened(block, batches)
    finished.settle({"first.last", "second.layer"})
    for run, _ in runs:
        run()
    block.first.last.weight.mul_(2)  # it is solved only now
    wanted = [block(x) for x in batches]
    finished.settle({"second.layer"})
    block.first.runs = 0
    for _ in range(2):
        assert all(torch.equal(run(), y) for (run, _), y in zip(runs, wanted, strict=True))
    assert block.first.runs == (0 if narrow else 3)
    finished.settle(set())
    assert all(torch.equal(run(), y) for (run, _), y in zip(runs, wanted, strict=True))
    finished.drop()
    block.second.runs = 0
    runs[0][0]()
    assert block.second.runs == 1
