"""Probe of draft verification: whether a model computes the branches of a tree as if each were alone, tried once with its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.engines.base import Chunk
from runtime.engines.rows import RowEngine
from runtime.engines.torch.drafts import TreePool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of logits, relative to how much they differ among tokens. A branch that sees another, or is at another place, is far off.
_BOUND, _BOUND_16_BITS = 0.02, 0.1
_PROMPTS = (3, 5)
_STARTS = (11, 23, 57)
# Of each piece. The leaves' texts are equally long.
_PARENTS = ([-1, 0, 0, 1, 2, 4], [-1, 0])
_LEAVES = ((0, 2, 4, 5), (0, 1))


@torch.inference_mode()
def probe(engine: RowEngine, module: PreTrainedModel) -> str | None:
    """What goes wrong when two trees are verified together; None: nothing."""
    name = type(module).__name__
    bound = _BOUND if module.dtype == torch.float32 else _BOUND_16_BITS
    least = float("inf")
    # Where 16 bits send a token to another expert, numbers are far off too, but not of every text.
    for start in _STARTS:
        try:
            off = _error(engine, module, start)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            lines = str(error).strip().splitlines()
            return f"{name} does not take the mask of a token tree: {lines[0] if lines else type(error).__name__}"
        if off < bound:
            return None
        least = min(least, off)
    return f"{name} does not compute the branches of a draft as if they were alone: its logits are off by {least:.2g}"


def _error(engine: RowEngine, module: PreTrainedModel, start: int) -> float:
    """How far logits after two leaves are from those of the branches alone, for sequences of tokens that begin with `start`."""
    pool, device = TreePool(engine, module), engine.device
    ids = ((torch.arange(2 * 16).view(2, 16) * 7919 + start) % engine.vocab_size).tolist()
    longest = max(_PROMPTS)
    prompts = [row[longest - count : longest] for row, count in zip(ids, _PROMPTS, strict=True)]
    pool.run([Chunk(prompt, 0, (row,)) for row, prompt in enumerate(prompts)], hidden=True)
    chunks = [
        Chunk(row[longest : longest + len(parents)], count, (number,), len(parents), parents)
        for number, (row, count, parents) in enumerate(zip(ids, _PROMPTS, _PARENTS, strict=True))
    ]
    found = pool.run(chunks, hidden=True)[0]
    leaves = zip(prompts, chunks, _LEAVES, strict=True)
    whole = [[*prompt, *(chunk.tokens[index] for index in leaf)] for prompt, chunk, leaf in leaves]
    expected = engine.forward(torch.tensor(whole, device=device), None, None, None, True)[:, -1]
    rows = [_LEAVES[0][-1], len(_PARENTS[0]) + _LEAVES[1][-1]]
    return float(_distance(found[rows], expected).max())


def _distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to the spread of what is expected."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return (found - expected).norm(dim=-1) / spread.clamp(min=1e-12)
