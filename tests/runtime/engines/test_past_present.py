"""The engine of exported graphs over a graph that adds up its cache: in place and with two sets, in parts of rows and of columns."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from runtime.engines.past_present import PastPresentEngine
from runtime.errors import RequestError

LENGTH = 310


class Adder(PastPresentEngine):
    """Caches ids; logits are their running sums, in a wider type than the cache."""

    device, vocab_size, weight_bytes = torch.device("cpu"), 5, 0
    cache_shapes = ((2, 3), (1, 4))
    dtype, logits_dtype, max_length = torch.float16, torch.float32, LENGTH

    def __init__(self, in_place: bool, rows: int, columns: int) -> None:
        self.in_place, self._part = in_place, (rows, columns)

    def explain(self) -> dict[str, str]:
        return {}

    def part(self, batch: int, width: int, past: int) -> tuple[int, int]:
        return min(batch, self._part[0]), min(width, self._part[1])

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        assert all(tensor.is_contiguous() for tensor in (*inputs.values(), *outputs.values()))
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        past, end = mask.shape[1] - ids.shape[1], mask.shape[1]
        for name, old in inputs.items():
            if name.startswith("past_key_values"):
                new = outputs[name.replace("past_key_values", "present")]
                assert (new.data_ptr() == old.data_ptr()) == self.in_place
                assert self.in_place or (old.shape[2], new.shape[2]) == (past, end)
                new[:, :, :past] = old[:, :, :past]
                new[:, :, past:end] = ids[:, None, :, None].to(new.dtype)
        cached = outputs["present.0.key"][:, 0, :end, 0].float() * mask
        outputs["logits"][:] = cached.cumsum(1)[:, past:, None]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("part", [(9, 999), (2, 3), (1, 1), (3, 7)])
def test_steps_growth_and_rows_that_end(in_place: bool, part: tuple[int, int]) -> None:
    engine, kept = Adder(in_place, *part), {150: [4, 1, 2], 5: [1]}
    cache, done = engine.new_cache(), 0
    ids = torch.randint(1, 4, (5, LENGTH), generator=torch.Generator().manual_seed(0))
    for width in (10, 1, 1, 150, 1, 5, 130, 1):  # rooms of 138, 267 and 310 columns
        sums = ids.float().cumsum(1)[:, done : done + width]
        last = width == 10
        found = engine.forward(ids[:, done : done + width], cache, None, None, last)
        assert found.dtype == torch.float32
        assert torch.equal(found[..., 0], sums[:, -1:] if last else sums)
        done += width
        if width in kept:
            rows = torch.tensor(kept[width])
            engine.keep_rows(cache, rows)
            ids = ids[rows]
    with pytest.raises(RequestError, match=r"311 tokens in a row.* built for 310"):
        engine.forward(torch.ones(1, LENGTH - done + 1, dtype=torch.int64), cache, None, None)
