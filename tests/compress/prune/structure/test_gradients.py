"""What a loss says of each unit, against differences of the loss itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from encoder_models import bert, save
from transformers import AutoModel, AutoModelForCausalLM

from compress.core.progress import Reporter
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.gradients import ROWS, sensitivities
from runtime.checkpoint.checkpoint import Checkpoint

STEP = 1e-2  # norms compute in float32, whose rounding a smaller one would magnify


def by_differences(model: Any, name: str, units: int, losses: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Mean over rows of the squared change of each row's loss by a factor on what each unit gives to its reader."""
    weight = model.get_submodule(name).weight
    whole = weight.detach().clone()
    each = weight.shape[1] // units
    found = []
    for unit in range(units):
        sides = []
        for factor in (1 + STEP, 1 - STEP):
            with torch.no_grad():
                weight.copy_(whole)
                weight[:, unit * each : (unit + 1) * each] *= factor
                sides.append(losses())
        found.append(((sides[0] - sides[1]) / (2 * STEP)).square().mean())
        with torch.no_grad():
            weight.copy_(whole)
    return torch.stack(found)


def measured(path: Path, readers: dict[str, int], batches: list[Batch]) -> dict[str, torch.Tensor]:
    with Reporter(None, quiet=True) as reporter:
        return sensitivities(StreamedModel(Checkpoint(path)), readers, batches, reporter)


def padded(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 250, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, length - 5 :] = False
    return ids, mask


def test_of_a_language_model(make_checkpoint: Any) -> None:
    path = make_checkpoint(dtype=torch.float32, intermediate_size=24)
    batches = [padded(3, 12), (padded(2, 9)[0], None)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()

    def losses() -> torch.Tensor:
        rows = []
        for ids, mask in batches:
            for number, row in enumerate(ids):
                own = None if mask is None else mask[number : number + 1]
                logits = model(input_ids=row[None], attention_mask=own).logits[0, :-1]
                each = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
                rows.append(each.sum() if own is None else each[own[0, 1:]].sum())
        return torch.stack(rows)

    readers = {"model.layers.0.mlp.down_proj": 24, "model.layers.1.self_attn.o_proj": 4}
    found = measured(path, readers, batches)
    for name, units in readers.items():
        expected = by_differences(model, name, units, losses)
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-2, atol=1e-4)


def test_of_an_encoder(tmp_path: Path) -> None:
    """Its loss is the hidden states along random directions, the same in each call."""
    path = save(bert(), tmp_path / "model")
    batches = [padded(3, 10)]
    ids, mask = batches[0]
    model = AutoModel.from_pretrained(path, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    directions = torch.cat([torch.randn((len(part), 10, width), generator=generator) for part in ids.split(ROWS)])

    def losses() -> torch.Tensor:
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return (states * directions * mask[..., None]).sum((1, 2))

    name = "encoder.layer.0.output.dense"
    units = model.get_submodule(name).in_features
    expected = by_differences(model, name, units, losses)
    torch.testing.assert_close(measured(path, {name: units}, batches)[name].double(), expected, rtol=1e-2, atol=1e-4)
