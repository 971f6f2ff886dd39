"""Acceptance of drafted tokens by the target: by position in the draft, for greedy decoding and for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from compress.distill.draft.student import Student, check_vocabulary
from compress.distill.train.data import TextRows
from compress.distill.train.teacher import Teacher, teacher_rows
from runtime.errors import RequestError

_TOGETHER = 4  # rows
Texts = dict[str, TextRows]


@dataclass
class _Chances:
    """Of rows `[n, s]`, for each token j ahead of anchors a (`[n, s - j]`, float64).

    Attributes:
        accepted: chance that token a + 1 + j of the row, drafted at a, was accepted, given that those between were.
        expected: the mean of that over all that the target might have said in its place.
        counted: the token is one to be measured.
    """

    accepted: list[torch.Tensor]
    expected: list[torch.Tensor]
    counted: list[torch.Tensor]


def measure_acceptance(
    student: Student | Any,
    target: Teacher | Any,
    rows: TextRows | torch.Tensor,
    *,
    length: int = 5,
    prompt: int | None = None,
    temperature: float = 1.0,
    texts: Texts | None = None,
) -> dict[str, Any]:
    """Acceptance of a draft by its target, on given text and on what the target itself writes.

    "continuations": the target continues the first tokens of every row, greedily and by sampling, and speculative decoding of just these
    texts is followed exactly. A step drafts `length` tokens; where some are rejected the next step begins after the first of these (whose
    place the target's own token takes), else after the extra token that the target adds. Greedy: a token is accepted if it is the
    target's. Sampling: a token x that the target wrote was an accepted one with probability min(1, q(x) / p(x)) (arXiv 2211.17192), so
    that steps are followed with their probabilities and not drawn.

    "text": the same walk along given text, which the target did not write. Greedy: the draft's likeliest token is the target's. Sampling:
    the sum over tokens of min(p, q). A draft's own tokens are then never read, those of the text are.

    Args:
        student: how the draft proposes (`Student`, or a causal language model of transformers).
        target: a Teacher, or what `Teacher.of` takes; without texts of its own ("continuations" is then None) if it only has logits.
        rows: held-out text, `[n, s]`; of `TextRows` the trained positions count.
        length: tokens of a draft.
        prompt: tokens of a row that are continued, up to the row's length; None: half of them.
        temperature: of sampling, above 0.
        texts: what `target_texts` gave for the same rows, prompt and temperature; None: the target writes them now.

    Returns:
        {"length", "text": {"greedy": R, "sampling": R}, "continuations": {...}}, plain data. R: "acceptance", the mean over all positions
        of the first drafted token; "by_position", for each place in a draft the share accepted of those whose predecessors all were
        (None: never reached); "accepted", the mean number of accepted tokens in a step; "tokens", that plus the target's own; "steps"
        that these are means of. None for R: no row has `length` tokens that count in a row (the target ended its texts sooner).
    """
    student = student if isinstance(student, Student) else Student(student)
    target = Teacher.of(target)
    rows = rows if isinstance(rows, TextRows) else TextRows(rows)
    _check(student, target, rows, length, temperature)
    training = student.training
    student.eval()
    try:
        text = {
            kind: _walked(student, target, rows, length, heat, written=False)
            for kind, heat in (("greedy", 0.0), ("sampling", temperature))
        }
        written = None
        if target.writes:
            if texts is None:
                texts = target_texts(target, rows, prompt=prompt, temperature=temperature)
            written = {
                kind: _walked(student, target, texts[kind], length, heat, written=True)
                for kind, heat in (("greedy", 0.0), ("sampling", temperature))
            }
    finally:
        student.train(training)
    return {"length": length, "text": text, "continuations": written}


def target_texts(target: Teacher, rows: TextRows, *, prompt: int | None = None, temperature: float = 1.0) -> Texts:
    """{"greedy", "sampling": what the target writes after the first tokens of rows}; arguments as of `measure_acceptance`."""
    size = rows.length // 2 if prompt is None else prompt
    if not 1 <= size < rows.length:
        raise RequestError(f"a prompt must be 1 to {rows.length - 1} tokens of the rows, not {size}")
    prompts, tokens = rows.ids[:, :size], rows.length - size
    heats = {"greedy": 0.0, "sampling": temperature}
    return {kind: teacher_rows(target, prompts, tokens, temperature=heat) for kind, heat in heats.items()}


def _walked(
    student: Student, target: Teacher, rows: TextRows, length: int, temperature: float, written: bool
) -> dict[str, Any] | None:
    reached = torch.zeros(length, dtype=torch.float64)
    passed = torch.zeros(length, dtype=torch.float64)
    steps = first = count = 0.0
    for start in range(0, len(rows), _TOGETHER):
        ids, trained = rows.ids[start : start + _TOGETHER], rows.trained[start : start + _TOGETHER]
        found = _chances(student, target, ids, trained, length, temperature, written)
        first += float(found.expected[0][found.counted[0]].sum())
        count += float(found.counted[0].sum())
        for row in range(len(ids)):
            at = follow(*([part[row] for part in parts] for parts in (found.accepted, found.expected, found.counted)))
            steps += at[0]
            reached += at[1]
            passed += at[2]
    if not steps:
        return None
    accepted = float(passed.sum()) / steps
    return {
        "acceptance": first / count,
        "by_position": [float(p / r) if r > 0 else None for p, r in zip(passed, reached, strict=True)],
        "accepted": accepted,
        "tokens": accepted + 1,
        "steps": round(steps, 3),
    }


def follow(
    accepted: list[torch.Tensor], expected: list[torch.Tensor], counted: list[torch.Tensor]
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Follow speculative decoding along one row.

    Args:
        accepted, expected, counted: for each place j in a draft, `[s - j]` by anchor; see `_Chances`.

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
    start = next((index for index, value in enumerate(whole) if value), None)
    reached, passed = [0.0] * length, [0.0] * length
    steps = 0.0
    if start is not None:
        begins[start] = 1.0
        for anchor in range(start, places):
            weight = begins[anchor]
            if not weight or not whole[anchor]:
                continue
            steps += weight
            reach = weight
            for place in range(length):
                reached[place] += reach
                passed[place] += reach * means[place][anchor]
                chance = chances[place][anchor]
                begins[anchor + place + 1] += reach * (1 - chance)
                reach *= chance
            begins[anchor + length + 1] += reach
    return steps, torch.tensor(reached, dtype=torch.float64), torch.tensor(passed, dtype=torch.float64)


@torch.no_grad()
def _chances(
    student: Student,
    target: Teacher,
    ids: torch.Tensor,
    trained: torch.Tensor,
    length: int,
    temperature: float,
    written: bool,
) -> _Chances:
    device = student.draft.device
    ids = ids.to(device)
    following = ids.roll(-1, 1)
    teacher = target.logits(ids)
    log_p = torch.log_softmax(teacher / (temperature or 1.0), -1)
    best = teacher.argmax(-1)
    kept = student.kept
    result = _Chances([], [], [])
    for ahead, logits in enumerate(student.proposals(ids, length)):
        log_q = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
        if temperature == 0:
            first = logits.argmax(-1)
            first = first if kept is None else kept[first]
            # Written by the target itself, the row's token is the target's choice, also where two are equally likely.
            wanted = following[:, ahead:] if written else best[:, ahead:]
            accepted = expected = (first == wanted).double()
        else:
            p = log_p[:, ahead:]
            # Of equal distributions the sum may be 1 and the rounding of a softmax; nothing is accepted more often than always.
            expected = torch.minimum(p if kept is None else p[..., kept], log_q).exp().double().sum(-1).clamp_max(1.0)
            accepted = expected
            if written:
                accepted = _ratio(p, log_q, following[:, ahead:], kept)
        result.accepted.append(accepted.cpu())
        result.expected.append(expected.cpu())
        result.counted.append(trained[:, ahead:])
    return result


def _ratio(log_p: torch.Tensor, log_q: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """min(1, q / p) of given tokens, 0 for those that the draft does not propose."""
    p = log_p.gather(-1, tokens[..., None])[..., 0]
    if kept is None:
        q = log_q.gather(-1, tokens[..., None])[..., 0]
    else:
        index = torch.searchsorted(kept, tokens.contiguous()).clamp_max(len(kept) - 1)
        q = log_q.gather(-1, index[..., None])[..., 0].masked_fill(kept[index] != tokens, -torch.inf)
    return (q.double() - p.double()).clamp_max(0).exp()


def _check(student: Student, target: Teacher, rows: TextRows, length: int, temperature: float) -> None:
    if not 1 <= length < rows.length:
        raise RequestError(f"a draft's length must be 1 to {rows.length - 1}, below that of the rows, not {length}")
    if not temperature > 0:
        raise RequestError(f"the temperature of sampling must be above 0, not {temperature}")
    check_vocabulary(student, target)
