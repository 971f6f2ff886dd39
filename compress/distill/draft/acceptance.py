"""Acceptance of drafted tokens by the target: by position in the draft, for greedy decoding and for sampling."""

from __future__ import annotations

from typing import Any

import torch

from compress.distill.draft.student import Student, columns_of
from compress.distill.train.data import TextRows
from compress.distill.train.teacher import Teacher, teacher_rows
from compress.model.module_hooks import evaluating

_TOGETHER = 4  # rows
WAYS = {"greedy": 0.0, "sampling": 1.0}  # temperatures
Texts = dict[str, TextRows]


def measure_acceptance(student: Student, target: Teacher, rows: TextRows, texts: Texts, length: int) -> dict[str, Any]:
    """Acceptance of a draft by its target, on given text and on what the target itself writes.

    "continuations": speculative decoding of just the texts that the target has written is followed exactly. A step drafts `length`
    tokens; where some are rejected the next step begins after the first of these (whose place the target's own token takes), else after
    the extra token that the target adds. Greedy: a token is accepted if it is the target's. Sampling: a token x that the target wrote was
    an accepted one with probability min(1, q(x) / p(x)) (arXiv 2211.17192), so that steps are followed with their probabilities and not
    drawn.

    "text": the same walk along given text, which the target did not write. Greedy: the draft's likeliest token is the target's. Sampling:
    the sum over tokens of min(p, q). A draft's own tokens are then never read, those of the text are.

    Args:
        rows: held-out text, `[n, s]`, whose trained positions count.
        texts: what `target_texts` gave.
        length: tokens of a draft, 1 to s - 1.

    Returns:
        {"length", "text": {"greedy": R, "sampling": R}, "continuations": {...}}, plain data. R: "acceptance", the mean over all positions
        of the first drafted token; "by_position", for each place in a draft the share accepted of those whose predecessors all were
        (None: never reached); "accepted", the mean number of accepted tokens in a step; "tokens", that plus the target's own; "steps"
        that these are means of. None for R: no row has `length` tokens that count in a row (the target ended its texts sooner).
    """
    with evaluating(student):
        return {
            "length": length,
            "text": _walked(student, target, rows, length, list(WAYS), written=False),
            "continuations": {
                way: _walked(student, target, texts[way], length, [way], written=True)[way] for way in WAYS
            },
        }


def target_texts(target: Teacher, rows: TextRows) -> Texts:
    """{"greedy", "sampling": what the target writes after the first half of rows}."""
    size = rows.length // 2
    prompts, tokens = rows.ids[:, :size], rows.length - size
    return {way: teacher_rows(target, prompts, tokens, temperature=temperature) for way, temperature in WAYS.items()}


def _walked(
    student: Student, target: Teacher, rows: TextRows, length: int, ways: list[str], written: bool
) -> dict[str, dict[str, Any] | None]:
    walks = {way: _Walk(length) for way in ways}
    for ids, trained in rows.parts(_TOGETHER):
        for way, found in _chances(student, target, ids, trained, length, ways, written).items():
            walks[way].add(*found)
    return {way: walk.means() for way, walk in walks.items()}


class _Walk:
    """What steps along rows come to, `length` tokens drafted in each."""

    def __init__(self, length: int) -> None:
        self._reached, self._passed = torch.zeros(2, length, dtype=torch.float64)
        self._steps = self._first = self._count = 0.0

    def add(self, accepted: list[torch.Tensor], expected: list[torch.Tensor], counted: list[torch.Tensor]) -> None:
        """Follow rows, of which `_chances` has said this."""
        self._first += float(expected[0][counted[0]].sum())
        self._count += float(counted[0].sum())
        for row in range(len(counted[0])):
            steps, reached, passed = follow(*([part[row] for part in parts] for parts in (accepted, expected, counted)))
            self._steps += steps
            self._reached += reached
            self._passed += passed

    def means(self) -> dict[str, Any] | None:
        """R of `measure_acceptance`."""
        if not self._steps:
            return None
        accepted = float(self._passed.sum()) / self._steps
        places = zip(self._passed, self._reached, strict=True)
        return {
            "acceptance": self._first / self._count,
            "by_position": [float(p / r) if r > 0 else None for p, r in places],
            "accepted": accepted,
            "tokens": accepted + 1,
            "steps": round(self._steps, 3),
        }


def follow(
    accepted: list[torch.Tensor], expected: list[torch.Tensor], counted: list[torch.Tensor]
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Follow speculative decoding along one row.

    Args:
        accepted, expected, counted: for each place j in a draft, `[s - j]` by anchor; as `_chances` gives them of all rows.

    Returns:
        Steps, and for each place in a draft how often it was reached and how often its token was accepted: expected numbers. A step whose
        draft would go beyond the tokens that count is none.
    """
    length = len(accepted)
    places = len(accepted[-1])
    chances = [part.tolist() for part in accepted]
    means = [part.tolist() for part in expected]
    whole = torch.stack([part[:places] for part in counted]).all(0).tolist()
    # A chance for every anchor that a step begins there; the first counted anchor is where the first one does.
    begins = [0.0] * (places + length + 1)
    if True in whole:
        begins[whole.index(True)] = 1.0
    reached, passed = [0.0] * length, [0.0] * length
    steps = 0.0
    for anchor in range(places):
        if not whole[anchor]:
            continue
        reach = begins[anchor]
        steps += reach
        for place in range(length):
            reached[place] += reach
            passed[place] += reach * means[place][anchor]
            chance = chances[place][anchor]
            begins[anchor + place + 1] += reach * (1 - chance)
            reach *= chance
        begins[anchor + length + 1] += reach
    return steps, torch.tensor(reached, dtype=torch.float64), torch.tensor(passed, dtype=torch.float64)


_Found = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


@torch.no_grad()
def _chances(
    student: Student,
    target: Teacher,
    ids: torch.Tensor,
    trained: torch.Tensor,
    length: int,
    ways: list[str],
    written: bool,
) -> dict[str, _Found]:
    """Of rows `[n, s]`, for each way, and for each token j ahead of anchors a, `[n, s - j]`: the chance that token a + 1 + j of the row,
    drafted at a, was accepted, given that those between were (float64); the mean of that over all that the target might have said in its
    place (float64); and whether the token is one to be measured (bool)."""
    ids = ids.to(student.draft.device)
    following = ids.roll(-1, 1)
    teacher = target.logits(ids)
    log_p, best, kept = torch.log_softmax(teacher, -1), teacher.argmax(-1), student.kept
    found: dict[str, _Found] = {way: ([], [], []) for way in ways}
    for ahead, logits in enumerate(student.proposals(ids, length)):
        for way, (accepted, expected, counted) in found.items():
            if way == "greedy":
                first = logits.argmax(-1)
                first = first if kept is None else kept[first]
                # Written by the target itself, the row's token is the target's choice, also where two are equally likely.
                wanted = following[:, ahead:] if written else best[:, ahead:]
                chance = mean = (first == wanted).double()
            else:
                p, log_q = log_p[:, ahead:], torch.log_softmax(logits.float(), -1)
                # Of equal distributions the sum may be 1 and the rounding of a softmax; nothing is accepted more often than always.
                mean = torch.minimum(p if kept is None else p[..., kept], log_q).exp().double().sum(-1).clamp_max(1.0)
                chance = _ratio(p, log_q, following[:, ahead:], kept) if written else mean
            accepted.append(chance.cpu())
            expected.append(mean.cpu())
            counted.append(trained[:, ahead:])
    return found


def _ratio(log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """min(1, q / p) of given tokens, 0 for those that the draft does not propose."""
    columns, there = columns_of(tokens, kept)
    p = log_p.gather(-1, tokens[..., None])[..., 0]
    q = log_q.gather(-1, columns[..., None])[..., 0].masked_fill(~there, -torch.inf)
    return (q.double() - p.double()).clamp_max(0).exp()
