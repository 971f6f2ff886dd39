"""How many channels each layer keeps, where that is left to their errors: one pass over the whole model, before it is cut."""

from __future__ import annotations

import json

import torch

from compress.core.files import intact, seal, write_json
from compress.prune.structure.cutting import Cutting, best
from compress.prune.structure.remove_channels import ChannelBlock, energy, sensitivities_of
from compress.prune.structure.widths import candidates, spread


def channel_widths(cutting: Cutting) -> list[int]:
    """As many channels in all as the job keeps, where the errors that layers make without the rest add up to the least.

    The error of a width is what the readers' outputs lose over the calibration text, as a share of the hidden state that they are added to:
    mean squared norms. It is measured once for a run and those that go on from it.
    """
    file = cutting.work / "widths.json"
    if not intact(file):
        write_json(file, {"widths": _choose(cutting)})
        seal(file)
    widths: list[int] = json.loads(file.read_text(encoding="utf-8"))["widths"]
    return widths


def _choose(cutting: Cutting) -> list[int]:
    job, streamed = cutting.job, cutting.streamed
    choices, gradients = job.choices(), sensitivities_of(cutting)
    asked = candidates(choices, job.size.count)
    batches = [*cutting.batches, cutting.probe]
    cutting.reporter.phase("structure: errors by width", len(streamed.blocks))
    states = cutting.states(len(batches), "widths")
    streamed.load_outside()
    streamed.prelude(batches, states)
    errors: list[dict[int, float]] = []
    with torch.inference_mode():
        for index in range(len(streamed.blocks)):
            with streamed.loaded_block(index) as block:
                found = _errors(ChannelBlock(gradients, cutting, block, index, states, batches), asked)
                squares = tokens = 0.0
                for number, batch in enumerate(batches):
                    state = streamed.advance(index, states.get(number), batch)
                    own = state if batch[1] is None else state[batch[1].to(state.device)]
                    squares += float(own.float().square().sum())
                    tokens += own.numel() / own.shape[-1]
                    states.put(number, state)
            errors.append({width: error * tokens / max(squares, 1e-30) for width, error in found.items()})
            cutting.reporter.step(f"block {index}: {errors[-1][asked[0]]:.2e} with {asked[0]} {job.size.unit}")
    states.drop()
    cut = [index for index, channels in enumerate(job.channels) if channels]  # others are as they are (experts)
    chosen = spread([errors[index] for index in cut], [*choices, job.size.count], job.kept * len(cut))
    widths = [job.size.count] * len(errors)
    for index, width in zip(cut, chosen, strict=True):
        widths[index] = width
    return widths


def _errors(opened: ChannelBlock, widths: list[int]) -> dict[int, float]:
    """Of each width, mean squared norm of what the block's readers of channels lose; a block without such has none to lose."""
    found = dict.fromkeys(widths, 0.0)
    for channels in opened.in_order():
        statistics = opened.statistics(channels)
        assert statistics is not None
        assert statistics.hessian is not None
        rank, _ = opened.rank(channels, statistics, widths[0])  # those that go first, and then the next
        for width in widths:
            if width < channels.count:
                before, after, _ = opened.without(channels, best(rank, width), statistics)
                found[width] += energy(before - after, statistics.hessian.cpu())
    return found
