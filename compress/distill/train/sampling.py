"""Texts of a transformers model, a batch of equally long prompts at a time, for training on what a draft or a teacher writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from runtime.errors import RequestError
from runtime.modeling.cache_argument import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def continuations(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
    ends: frozenset[int] = frozenset(),
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue prompts as the model would.

    Args:
        model: on any device; a training mode (dropout) is set aside.
        prompts: int64 `[b, p]`, no padding.
        tokens: to write.
        temperature: 0: the likeliest tokens; above: drawn from the logits divided by it.
        seeds: one a row. A row's draws are its own, so that what shares its batch changes nothing but rounding.
        ends: ids after which a row is done.
        kept: int `[k]`, the only ids that are written; None: all.

    Returns:
        int64 `[b, p + tokens]` on the CPU, a row's own first end token repeated after it, and int64 `[b]`, the tokens up to and with it.

    Raises:
        RequestError: values out of range.
    """
    if temperature < 0 or len(seeds) != len(prompts):
        raise RequestError(
            f"sampling: a temperature of at least 0 and a seed for each of {len(prompts)} prompts are needed"
        )
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    device, training = next(model.parameters()).device, model.training
    name = cache_argument(model)
    model.eval()
    try:
        ids, cache = prompts.to(device), None
        step, written = ids, list[torch.Tensor]()
        done = torch.zeros(len(ids), dtype=torch.bool, device=device)
        ending = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        lengths = torch.full((len(ids),), tokens, device=device)
        for number in range(tokens):
            output = model(input_ids=step, use_cache=True, **{name: cache})
            cache = output[name]
            chosen = _choose(output.logits[:, -1].float(), temperature, generators, kept)
            if number:
                chosen = torch.where(done, written[-1], chosen)
            ended = torch.isin(chosen, ending) & ~done
            lengths[ended] = number + 1
            done |= ended
            written.append(chosen)
            step = chosen[:, None]
            if bool(done.all()):
                written += [chosen] * (tokens - number - 1)
                break
    finally:
        model.train(training)
    return torch.cat([ids, torch.stack(written, 1)], 1).cpu(), lengths.cpu()


def _choose(
    logits: torch.Tensor, temperature: float, generators: list[torch.Generator], kept: torch.Tensor | None
) -> torch.Tensor:
    names = None if kept is None else kept.to(logits.device, torch.int64)
    if names is not None:
        logits = logits[:, names]
    if temperature == 0:
        picked = logits.argmax(-1)
    else:
        # In float64: the sum over a large vocabulary must not swallow its unlikely end.
        sums = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
        drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators]).to(logits.device)
        picked = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)[:, 0].clamp_max(
            logits.shape[-1] - 1
        )
    return picked if names is None else names[picked]
