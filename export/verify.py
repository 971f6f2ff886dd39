"""Comparison of an export with its artifact, on sequences that the artifact wrote itself.

Sequences come from the artifact (sampled, then continued greedily), so that no data set is needed and every position is one that
the model would reach. Two engines never sum in the same order; where the artifact's two best tokens are closer than rounding
can tell apart, either counts as right, and such near ties are counted apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.errors import CompressError

if TYPE_CHECKING:
    from export.source import Source
    from export.target import Job

Logits = Callable[[torch.Tensor], torch.Tensor]  # ids int64 [batch, seq] -> [batch, seq, vocab]
# prompts of any lengths, new tokens -> the new ids, greedy
Generate = Callable[[list[list[int]], int], list[list[int]]]

PROMPTS = 8
PROMPT_TOKENS = 12
NEW_TOKENS = 16
RAGGED = 4  # so many different lengths the prompts have
TIE = 0.02  # logits; distance of two tokens that rounding in another order of summation may swap


@dataclass(frozen=True)
class Probe:
    """What the artifact says in exact mode, computed in float32 unless a target's reader cannot.

    Attributes:
        prompts: token ids, of different lengths.
        rows: each prompt with its greedy continuation, all of one length; int64 `[prompts, seq]`.
        logits: of `rows`, float32 `[prompts, seq, vocab]`.
        continuations: the greedy new tokens after each prompt.
    """

    prompts: list[list[int]]
    rows: torch.Tensor
    logits: torch.Tensor
    continuations: list[list[int]]

    def outcomes(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the artifact and, from `[prompts, seq, vocab]`, of another engine over the tokens that KL is summed over."""
        return self.logits, other


def load_artifact(source: Source, path: Path | None = None, **options: Any) -> Any:
    """The artifact's own model, or the one in `path`: in float32 on a CPU, but for options of `runtime.load`."""
    import runtime

    options = {"device": "cpu", "dtype": "float32", "trust_remote_code": source.trust_remote_code, **options}
    return runtime.load(path or source.path, verify=False, **options)


def generate(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of a `runtime.Model`, end tokens not heeded."""
    return model.generate(prompts, max_new_tokens=count, ignore_eos=True)


def probe(job: Job, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS, **options: Any) -> Probe:
    """Run the artifact (a decoder) through `load_artifact` and let it go again."""
    found = probe_model(load_artifact(job.source, **options), prompts, new_tokens)
    gc.collect()
    return found


def probe_model(model: Any, prompts: int = PROMPTS, new_tokens: int = NEW_TOKENS) -> Probe:
    """What a `runtime.Model` says; see `Probe`."""
    generator = torch.Generator().manual_seed(0)
    limit = model.engine.context_length or 1 << 30
    length = max(1, min(PROMPT_TOKENS, limit // 2))
    new_tokens = max(1, min(new_tokens, limit - length))
    ragged = min(RAGGED, length)
    seeds = torch.randint(0, model.engine.vocab_size, (prompts, 1), generator=generator).tolist()
    texts = seeds
    if length > 1:
        written = model.generate(seeds, max_new_tokens=length - 1, temperature=1.0, seed=0, ignore_eos=True)
        texts = [seed + more for seed, more in zip(seeds, written, strict=True)]
    asked = [text[: length - i % ragged] for i, text in enumerate(texts)]  # a batch of them needs padding
    longest = length + new_tokens
    written = [model.generate([a], max_new_tokens=longest - len(a), ignore_eos=True)[0] for a in asked]
    rows = torch.tensor([a + c for a, c in zip(asked, written, strict=True)])
    continuations = [c[:new_tokens] for c in written]
    return Probe(asked, rows, model.logits(rows), continuations)


def compare_logits(reference: Probe, logits: Logits, kl_limit: float) -> dict[str, Any]:
    """`kl` (mean, nats a token), `kl_worst`, `top1_agreement` and `logit_difference` of another engine on the probe's rows.

    Raises:
        CompressError: not finite, the wrong shape, or a mean KL above `kl_limit`.
    """
    other = logits(reference.rows).float().cpu()
    if other.shape != reference.logits.shape:
        raise CompressError(f"the export gives logits {list(other.shape)}, the artifact {list(reference.logits.shape)}")
    if not bool(other.isfinite().all()):
        raise CompressError("the export gives logits that are not finite")
    ours, theirs = (logits.log_softmax(-1) for logits in reference.outcomes(other))
    kl = (ours.exp() * (ours - theirs)).sum(-1).clamp(min=0)
    metrics = {
        "kl": float(kl.mean()),
        "kl_worst": float(kl.max()),
        "top1_agreement": float((reference.logits.argmax(-1) == other.argmax(-1)).float().mean()),
        "logit_difference": float((reference.logits - other)[reference.logits.isfinite()].abs().max()),
    }
    if not metrics["kl"] <= kl_limit:  # NaN too
        raise CompressError(
            f"the export does not compute what the artifact does: KL {metrics['kl']:.3g} nats a token, allowed {kl_limit:g}"
        )
    return metrics


def compare(reference: Probe, logits: torch.Tensor, kl_limit: float, tie: float) -> dict[str, Any]:
    """`compare_logits` of another engine's logits `[prompts, seq, vocab]`, and `compare_tokens` of the tokens that are likeliest by them.

    Up to the first difference, which is all that counts, those are the tokens of greedy decoding.
    """
    best = logits.argmax(-1).tolist()

    def likeliest(prompts: list[list[int]], count: int) -> list[list[int]]:
        return [row[len(prompt) - 1 :][:count] for prompt, row in zip(prompts, best, strict=True)]

    return compare_logits(reference, lambda _: logits, kl_limit) | compare_tokens(reference, likeliest, tie)


def compare_tokens(reference: Probe, generate: Generate, tie: float = TIE) -> dict[str, Any]:
    """`tokens`, `same_tokens` and `near_ties` of greedy continuations of the probe's prompts, as one batch.

    A continuation is compared up to its first difference; that one must be a near tie of the artifact's logits.

    Raises:
        CompressError: a difference that is no near tie, or the wrong number of tokens.
    """
    count = len(reference.continuations[0])
    answers = generate(reference.prompts, count)
    same = ties = total = 0
    for row, (expected, found) in enumerate(zip(reference.continuations, answers, strict=True)):
        if len(found) != len(expected):
            raise CompressError(f"the export generated {len(found)} tokens where {len(expected)} were asked for")
        total += len(expected)
        first = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
        same += len(expected) if first is None else first
        if first is None:
            continue
        ties += 1
        logits = reference.logits[row, len(reference.prompts[row]) + first - 1]
        gap = float(logits[expected[first]] - logits[found[first]])
        if not gap <= tie:
            raise CompressError(
                f"the export continues prompt {row} with token {found[first]} where the artifact says {expected[first]} "
                f"(token {first + 1} of {len(expected)}; the artifact's logits are {gap:.3g} apart, ties are up to {tie:g})"
            )
    return {"tokens": total, "same_tokens": same, "near_ties": ties}
