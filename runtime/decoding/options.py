"""What a caller may ask of one generation, checked before any work starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.errors import RequestError

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True)
class GenerationOptions:
    """Options of `Model.generate` and `Model.stream`.

    Attributes:
        max_new_tokens: stop after this many tokens, >= 1. None: 128, or fewer when the context has no room for them.
        temperature: 0 takes the most likely token (greedy); above 0 samples from the logits divided by it.
        top_k: sample among the k most likely tokens; None keeps all.
        top_p: sample among the fewest tokens whose probabilities reach p, in (0, 1] (nucleus sampling, arXiv 1904.09751).
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1] (arXiv 2407.01082).
        repetition_penalty: > 0; above 1 lowers the logits of tokens of the prompt and of the output (CTRL, arXiv 1909.05858).
        stop: a text or several; the output ends before the first one that appears.
        seed: makes sampling reproducible: a prompt gives the same output whatever else is in its batch. A list gives each
            prompt of a batch a seed of its own. None draws a fresh one.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | tuple[int, ...] | None = None
    ignore_eos: bool = False

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], function: str) -> GenerationOptions:
        """Build from the keywords a user gave to `function` (named in messages).

        Raises:
            RequestError: an unknown name, a wrong type or a value out of range.
        """
        reject_unknown(keywords, [field.name for field in fields(cls)], function)
        values = dict(keywords)
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        elif values.get("stop") is None:
            values["stop"] = ()
        if isinstance(values["stop"], list):
            values["stop"] = tuple(values["stop"])
        if isinstance(values.get("seed"), list):
            values["seed"] = tuple(values["seed"])
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 1)
        _number("temperature", self.temperature, "a number >= 0", lambda v: v >= 0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, 1)
        _number("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1)
        _number("min_p", self.min_p, "between 0 and 1", lambda v: 0 <= v <= 1)
        _number("repetition_penalty", self.repetition_penalty, "above 0", lambda v: v > 0)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be a non-empty text or a list of them, not {_show(self.stop)}")
        for seed in self.seed if isinstance(self.seed, tuple) else () if self.seed is None else (self.seed,):
            _integer("seed", seed, 0, 2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {_show(self.ignore_eos)}")


def reject_unknown(keywords: Mapping[str, Any], allowed: list[str], function: str) -> None:
    """RequestError naming the nearest allowed keyword for the first unknown one."""
    for name in keywords:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(allowed)}"
            raise RequestError(f"{function}() has no option {name!r}: {hint}")


def _integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum or (maximum and value > maximum):
        upper = f" and <= {maximum}" if maximum else ""
        raise RequestError(f"{name} must be an integer >= {minimum}{upper}, not {_show(value)}")


def _number(name: str, value: Any, allowed: str, fits: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not fits(value):
        raise RequestError(f"{name} must be {allowed}, not {_show(value)}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
