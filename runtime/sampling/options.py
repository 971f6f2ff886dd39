"""Options of one generation, checked before any work starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from runtime.errors import RequestError
from runtime.system.describe import integer, is_integer, number, reject_unknown, show
from runtime.system.sizes import byte_count

__all__ = ["DEFAULT_NEW_TOKENS", "GenerationOptions", "reject_unknown"]

DEFAULT_NEW_TOKENS = 128


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, (tuple, list)) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"{name} must be a non-empty text or a list of them, not {show(value)}")
    return tuple(stops)


def _seeds(name: str, value: Any) -> int | tuple[int, ...]:
    check = integer(0)
    return tuple(check(name, seed) for seed in value) if isinstance(value, (tuple, list)) else check(name, value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {show(value)}")
    return value


def _progress(name: str, value: Any) -> bool | Callable[[int, int], Any]:
    if not isinstance(value, bool) and not callable(value):
        raise RequestError(f"{name} must be True, False or a function of (done, total), not {show(value)}")
    return value


def _cancel(name: str, value: Any) -> Any:
    if not callable(getattr(value, "is_set", None)):
        raise RequestError(f"{name} must be a threading.Event, or another object with is_set(), not {show(value)}")
    return value


_DOOR = (
    "use transformers' own generate: `import runtime`, then AutoModelForCausalLM.from_pretrained(path).generate(...)"
)
_SCORES = "use logits(input_ids) or score(text)"
#: Keywords of transformers' generate: the neutral value, and the alternative here for any other value.
_TRANSFORMERS: dict[str, tuple[Any, str]] = {
    "num_beams": (1, _DOOR), "num_beam_groups": (1, _DOOR), "length_penalty": (1.0, _DOOR), "early_stopping": (False, _DOOR),
    "no_repeat_ngram_size": (0, _DOOR), "typical_p": (1.0, _DOOR), "penalty_alpha": (0.0, _DOOR), "logits_processor": (None, _DOOR),
    "stopping_criteria": (None, _DOOR), "bad_words_ids": (None, _DOOR),
    "num_return_sequences": (1, "repeat the prompt in a list, `[prompt] * n`, with temperature above 0"),
    "max_length": (None, "it counts the prompt too; use max_new_tokens"),
    "min_length": (0, "ignore_eos=True generates max_new_tokens tokens"),
    "min_new_tokens": (0, "ignore_eos=True generates max_new_tokens tokens"),
    "eos_token_id": (None, "the model's eos_token_ids end a text; use stop for other endings, ignore_eos=True for none"),
    "input_ids": (None, "give texts or token ids as the first argument"), "inputs": (None, "give texts or token ids as the first argument"),
    "attention_mask": (None, "give prompts of any length in one list, without padding"),
    "streamer": (None, "use stream(prompt), which yields text as it is generated"),
    "use_cache": (True, "the cache is always used; runtime.load(kv_cache=...) compresses it"),
    "cache_implementation": (None, "runtime.load(kv_cache=...) compresses the cache"),
    "past_key_values": (None, "prompts share the cache of common prefixes; session() keeps all of it between calls"),
    "assistant_model": (None, "use runtime.load(drafter=...)"), "generation_config": (None, "give its values as options"),
    "output_scores": (False, _SCORES), "output_logits": (False, _SCORES), "return_dict_in_generate": (False, _SCORES),
    "generator": (None, "use seed"),
}  # fmt: skip


def _translated(keywords: Mapping[str, Any], function: str, ends: Collection[int]) -> dict[str, Any]:
    """Keywords without neutral ones of transformers' generate; RequestError names the alternative to any other."""
    found = {name: value for name, value in keywords.items() if name not in _TRANSFORMERS and name != "pad_token_id"}
    for name, value in keywords.items():
        neutral, instead = _TRANSFORMERS.get(name, (None, ""))
        given = value if isinstance(value, list) else [value]
        own = name == "eos_token_id" and all(map(is_integer, given)) and set(given) == set(ends)
        if instead and not own and value is not None and not (isinstance(value, int | float) and value == neutral):
            raise RequestError(f"{function}() has no option {name!r}: {instead}")
    if "stop_strings" in found:
        found.setdefault("stop", found.pop("stop_strings"))
    sample = found.pop("do_sample", None)
    if sample is not None:
        warm = found.get("temperature")
        if _switch("do_sample", sample):
            found["temperature"] = 1.0 if warm is None else warm
            if warm == 0:
                raise RequestError("do_sample=True needs a temperature above 0")
        elif warm is None or warm == 0:
            found["temperature"] = 0.0
        else:
            raise RequestError(
                f"do_sample=False is greedy, but temperature={show(warm)} samples: give only one of them"
            )
    return found


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class GenerationOptions:
    """Options of `Model.generate` and `Model.stream`.

    Neutral keywords of transformers' generate are accepted: `do_sample=True` is a temperature of 1 unless one is given,
    `do_sample=False` is greedy, `stop_strings` is `stop`; `num_beams=1`, `pad_token_id` and the model's own `eos_token_id` change nothing.

    Attributes:
        max_new_tokens: stop after this many tokens, >= 1. None: 128, or fewer when the context has no room for them.
        temperature: 0 takes the most likely token (greedy); above 0 samples from the logits divided by it.
        top_k: sample among the k most likely tokens; None keeps all.
        top_p: sample among the fewest tokens whose probabilities reach p, in (0, 1] (nucleus sampling, arXiv 1904.09751).
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1] (arXiv 2407.01082).
        repetition_penalty: 1e-4 to 1e4; above 1 lowers the logits of tokens of the prompt and of the output
            (CTRL, arXiv 1909.05858).
        stop: a text or several; the output ends before the first one that appears.
        seed: makes sampling reproducible: a prompt gives the same output whatever else is in its batch. A list gives each
            prompt of a batch a seed of its own. None draws a fresh one.
        ignore_eos: go on after an end-of-sequence token.
        cache_memory: bytes, or a text like "2GB", that the KV cache of this call takes at most (engines with a paged cache, and
            models whose cache is compressed). With a paged cache the call then has one of its own and takes turns with other calls.
            None: all calls share a cache of the size that `runtime.load` says at its own `cache_memory`; for a model loaded with
            `max_memory`, of what that leaves.
        prefill_chunk: most prompt tokens that are read in one step, beside the sequences that decode (engines with a paged
            cache). None: as many as the engine takes.
        cancel: a `threading.Event` (or whatever has `is_set()`) that any thread may set: the call ends before its next step, with what
            it has written so far; its prompts that were not finished have the finish reason "cancelled".
        progress: True draws a bar on stderr; a function is called with (finished prompts, all prompts). Not for streams.
    """

    max_new_tokens: int | None = _option(None, integer(1))
    temperature: float = _option(0.0, number("a number >= 0", lambda v: v >= 0))
    top_k: int | None = _option(None, integer(1))
    top_p: float = _option(1.0, number("above 0 and at most 1", lambda v: 0 < v <= 1))
    min_p: float = _option(0.0, number("between 0 and 1", lambda v: 0 <= v <= 1))
    # The bounds keep every float32 logit finite.
    repetition_penalty: float = _option(1.0, number("above 0 (from 1e-4 to 1e4)", lambda v: 1e-4 <= v <= 1e4))
    stop: tuple[str, ...] = _option((), _stops)
    seed: int | tuple[int, ...] | None = _option(None, _seeds)
    ignore_eos: bool = _option(False, _switch)
    cache_memory: int | None = _option(None, byte_count)
    prefill_chunk: int | None = _option(None, integer(1))
    cancel: Any = _option(None, _cancel)  # noqa: RUF009
    progress: bool | Callable[[int, int], Any] = _option(False, _progress)  # noqa: RUF009

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any], function: str, ends: Collection[int] = ()) -> GenerationOptions:
        """Build from the keywords a user gave to `function` (named in messages); `ends` are the model's end-of-sequence tokens.

        Raises:
            RequestError: an unknown name, a wrong type or a value out of range.
        """
        known = {option.name: option for option in fields(cls) if function != "stream" or option.name != "progress"}
        keywords = _translated(keywords, function, ends)
        reject_unknown(keywords, [*known, "do_sample"], function)
        given = {
            name: value
            for name, value in keywords.items()
            if value is not None or known[name].default not in (None, ())
        }
        return cls(**{name: known[name].metadata["check"](name, value) for name, value in given.items()})
