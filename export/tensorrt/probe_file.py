"""File of the artifact's logits and tokens in a bundle: the machine that finishes it has no artifact to compare with.

All logits of a large vocabulary would weigh more than many a model. The file has the best of each position and the mass of all
others, so that KL divergence can still be computed, over the best and "any other": never above the whole one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from export.onnx_graph.change import Expected
from export.tensorrt.bundle import PROBE
from export.verify import Probe
from runtime.errors import ArtifactError

BEST = 256  # logits of a position


@dataclass(frozen=True)
class BestProbe(Probe):
    """A probe with the best logits only; the others are minus infinity in `logits`.

    Attributes:
        ids: int64 `[prompts, seq, best]`, the tokens whose logits are in the file.
        rest: float32 `[prompts, seq]`, log of the summed exponentials of the others; minus infinity where there are none.
    """

    ids: torch.Tensor
    rest: torch.Tensor

    def outcomes(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ours, theirs = self.logits.gather(-1, self.ids), other.gather(-1, self.ids)
        if bool(self.rest.isinf().all()):
            return ours, theirs
        return torch.cat([ours, self.rest.unsqueeze(-1)], -1), torch.cat(
            [theirs, _rest(other, self.ids).unsqueeze(-1)], -1
        )


def save_expected(expected: Expected, folder: Path) -> None:
    """Write `probe.safetensors`."""
    from safetensors.torch import save_file

    probe = expected.probe
    best = probe.logits.topk(min(BEST, probe.logits.shape[-1]), dim=-1)
    tensors = {
        "rows": probe.rows.contiguous(),
        "logits": best.values.contiguous(),
        "ids": best.indices.to(torch.int32).contiguous(),
        "rest": _rest(probe.logits, best.indices).contiguous(),
        "prompt_lengths": torch.tensor([len(p) for p in probe.prompts]),
    }
    facts = {
        "vocabulary": str(probe.logits.shape[-1]),
        "new_tokens": str(len(probe.continuations[0])),
        "change": json.dumps(expected.change),
    }
    save_file(tensors, folder / PROBE, metadata=facts)


def load_expected(folder: Path) -> Expected | None:
    """What `save_expected` wrote; None where the bundle has none.

    Raises:
        ArtifactError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / PROBE).is_file():
        return None
    try:
        with safe_open(folder / PROBE, "pt") as file:
            facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows, lengths, count = tensors["rows"], tensors["prompt_lengths"].tolist(), int(facts["new_tokens"])
        ids, rest = tensors["ids"].long(), tensors["rest"]
        logits = torch.full((*rows.shape, int(facts["vocabulary"])), float("-inf"))
        logits.scatter_(-1, ids, tensors["logits"])
        change = {str(name): float(value) for name, value in json.loads(facts["change"]).items()}
    except (SafetensorError, AttributeError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise ArtifactError(f"{folder / PROBE} is damaged: {error}") from error
    prompts = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    continuations = [row[length : length + count].tolist() for row, length in zip(rows, lengths, strict=True)]
    return Expected(BestProbe(prompts, rows, logits, continuations, ids, rest), change)


def _rest(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log of the summed exponentials of all logits but those of `ids`, `[prompts, seq]`."""
    return logits.float().scatter(-1, ids, float("-inf")).logsumexp(-1)
