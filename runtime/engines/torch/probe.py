"""Whether a model computes the branches of a draft as it should: tried once, with its own weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.engines.base import Chunk
from runtime.engines.torch.drafts import TorchDrafts

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine

# Of logits, relative to how much they differ among tokens. A branch that sees another, or is at another place, is far off.
_BOUND, _BOUND_16_BITS = 0.02, 0.1
_PROMPTS = (3, 5)
_STARTS = (11, 23, 57)
# Of each piece. The leaves' texts are equally long.
_PARENTS = ([-1, 0, 0, 1, 2, 4], [-1, 0])
_LEAVES = ((0, 2, 4, 5), (0, 1))


@torch.inference_mode()
def why_not(engine: TorchEngine) -> str | None:
    """What goes wrong when two trees are verified together; None: nothing."""
    name = type(engine.module).__name__
    bound = _BOUND if engine.module.dtype == torch.float32 else _BOUND_16_BITS
    least = float("inf")
    # Where 16 bits send a token to another expert, numbers are far off too, but not of every text.
    for start in _STARTS:
        try:
            off = _error(engine, start)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            lines = str(error).strip().splitlines()
            return f"{name} does not take the mask of a token tree: {lines[0] if lines else type(error).__name__}"
        if off < bound:
            return None
        least = min(least, off)
    return f"{name} does not compute the branches of a draft as if they were alone: its logits are off by {least:.2g}"


def _error(engine: TorchEngine, start: int) -> float:
    """How far logits after two leaves are from those of the branches alone, for texts of tokens that begin with `start`."""
    drafts = TorchDrafts(engine, len(_PROMPTS), True)
    device, longest = engine.device, max(_PROMPTS)
    ids = (torch.arange(2 * 16, device=device).view(2, 16) * 7919 + start) % engine.vocab_size
    shift = torch.tensor([longest - count for count in _PROMPTS], device=device)[:, None]
    positions = torch.arange(longest, device=device)[None] - shift
    drafts.read(ids[:, :longest], (positions >= 0).long(), positions.clamp(min=0))
    pieces = [
        Chunk(ids[row, longest : longest + len(parents)].tolist(), count, (), parents=parents)
        for row, (count, parents) in enumerate(zip(_PROMPTS, _PARENTS, strict=True))
    ]
    found, _ = drafts.verify(pieces)
    whole = []
    for row, (count, leaf) in enumerate(zip(_PROMPTS, _LEAVES, strict=True)):
        branch = [pieces[row].tokens[index] for index in leaf]
        whole.append([*ids[row, longest - count : longest].tolist(), *branch])
    expected = engine.forward(torch.tensor(whole, device=device), None, None, None, True)[:, -1]
    rows = [_LEAVES[0][-1], len(_PARENTS[0]) + _LEAVES[1][-1]]
    return float(_distance(found[rows], expected).max())


def _distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to the spread of what is expected."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return (found - expected).norm(dim=-1) / spread.clamp(min=1e-12)
