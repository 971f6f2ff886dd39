"""What `runtime.load` returns: text or token ids in, text, token ids, logits or scores out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from runtime.artifact import Artifact
from runtime.decoding.loop import decode
from runtime.decoding.options import DEFAULT_NEW_TOKENS, GenerationOptions
from runtime.decoding.output import SequenceOutput
from runtime.decoding.stats import GenerationStats
from runtime.engines.base import Engine
from runtime.errors import RequestError

_SCORE_CHUNK = 512  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Score:
    """How likely a text is: `log_likelihood` (natural log) of its `tokens` tokens after the first, each given all before it."""

    log_likelihood: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / self.tokens)


class Model:
    """A loaded causal language model. Made by `runtime.load`.

    Attributes:
        tokenizer: the transformers tokenizer of the directory; None when it has none (token ids still work).
        artifact: the directory it came from.
        engine: what computes.
        eos_token_ids: tokens that end a text.
    """

    def __init__(self, engine: Engine, tokenizer: Any, artifact: Artifact, eos_token_ids: frozenset[int]) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.artifact = artifact
        self.eos_token_ids = eos_token_ids
        self._last = GenerationStats()

    # ---------------------------------------------------------------- generation
    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: list[str], **options: Any) -> list[str]: ...
    @overload
    def generate(self, prompt: list[int], **options: Any) -> list[int]: ...
    @overload
    def generate(self, prompt: list[list[int]], **options: Any) -> list[list[int]]: ...

    def generate(self, prompt: Any, **options: Any) -> Any:
        """Continue a prompt, or each of a batch of prompts of any lengths. Only what is new is returned.

        Args:
            prompt: a text gives a text, a list of texts a list of texts, a list of token ids the new token ids, a list of such
                lists a list of them.
            options: max_new_tokens, temperature (0, the default: greedy), top_k, top_p, min_p, repetition_penalty, stop, seed,
                ignore_eos; see `runtime.decoding.options.GenerationOptions`.

        Raises:
            RequestError: an unknown option, a value out of range, an empty prompt or one that does not fit the context.
        """
        request = _Request(self, prompt, GenerationOptions.from_keywords(options, "generate"))
        for _ in request.run():
            pass
        results = [output.text if request.is_text else list(output.tokens) for output in request.outputs]
        return results if request.is_batch else results[0]

    @overload
    def stream(self, prompt: str, **options: Any) -> Iterator[str]: ...
    @overload
    def stream(self, prompt: list[int], **options: Any) -> Iterator[int]: ...

    def stream(self, prompt: Any, **options: Any) -> Iterator[Any]:
        """Like `generate` for one prompt, but yields the text in pieces (or the token ids one by one) while they are made.

        The pieces together are exactly what `generate` returns: a piece is held back while it may be part of an unfinished
        character or of a stop string.
        """
        request = _Request(self, prompt, GenerationOptions.from_keywords(options, "stream"))
        if request.is_batch:
            raise RequestError("stream takes one prompt; use generate for a batch")
        return self._pieces(request)

    def _pieces(self, request: _Request) -> Iterator[Any]:
        output = request.outputs[0]
        done = 0
        for _ in request.run():
            certain = output.text if request.is_text else output.tokens
            if len(certain) > done:
                if request.is_text:
                    yield certain[done:]
                else:
                    yield from certain[done:]
                done = len(certain)

    # ---------------------------------------------------------------- logits and likelihood
    def logits(self, input_ids: torch.Tensor | Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of every position: token ids `[batch, seq]` to float32 `[batch, seq, vocab]` on the model's device."""
        try:
            ids = torch.as_tensor(input_ids)
        except (ValueError, TypeError, RuntimeError) as error:
            raise RequestError("input_ids must be token ids of shape [batch, seq], all rows equally long") from error
        if (
            ids.dim() != 2
            or ids.numel() == 0
            or ids.dtype.is_floating_point
            or ids.dtype in (torch.bool, torch.complex64)
        ):
            raise RequestError(
                f"input_ids must be integers of shape [batch, seq], not {_short(ids.dtype)} of shape {list(ids.shape)}"
            )
        for row in ids.tolist():
            self._check_ids(row)
        return self.engine.forward(ids.to(self.engine.device, torch.int64), None, None, None)

    @overload
    def score(self, text: str | list[int]) -> Score: ...
    @overload
    def score(self, text: list[str] | list[list[int]]) -> list[Score]: ...

    def score(self, text: Any) -> Any:
        """Log-likelihood and perplexity of a text (or token ids), or of each of a list of them."""
        prompts, _, is_batch = self._read(text, "text")
        for ids in prompts:
            if len(ids) < 2:
                raise RequestError("a text needs at least two tokens to have a likelihood")
        scores = [self._score(ids) for ids in prompts]
        return scores if is_batch else scores[0]

    def _score(self, ids: list[int]) -> Score:
        cache = self.engine.new_cache()
        total = 0.0
        for start in range(0, len(ids) - 1, _SCORE_CHUNK):
            end = min(start + _SCORE_CHUNK, len(ids) - 1)
            chunk = torch.tensor([ids[start:end]], device=self.engine.device)
            positions = torch.arange(start, end, device=self.engine.device)[None]
            logits = self.engine.forward(chunk, cache, None, positions)[0]
            following = torch.tensor(ids[start + 1 : end + 1], device=self.engine.device)
            chosen = torch.log_softmax(logits, dim=-1).gather(-1, following[:, None])
            total += float(chosen.double().sum())
        return Score(total, len(ids) - 1)

    # ---------------------------------------------------------------- facts
    @property
    def stats(self) -> dict[str, Any]:
        """Numbers of the last generate or stream (see `GenerationStats`), and `weight_bytes`, the weights as held in memory."""
        return {**self._last.as_dict(), "weight_bytes": self.engine.weight_bytes}

    def explain(self) -> dict[str, str]:
        """{layer: the kernel that computes it}."""
        return self.engine.explain()

    # ---------------------------------------------------------------- reading prompts
    def _read(self, prompt: Any, what: str = "prompt") -> tuple[list[list[int]], bool, bool]:
        """Token ids of each prompt, whether they came as text, whether they came as a batch."""
        if isinstance(prompt, str):
            return [self._encode(prompt, what)], True, False
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"{what} must be a text, a list of token ids, or a list of those, not a {type(prompt).__name__}"
            )
        if not prompt:
            raise RequestError(f"the {what} is empty")
        if all(isinstance(p, str) for p in prompt):
            return [self._encode(p, what) for p in prompt], True, True
        if all(_is_id(p) for p in prompt):
            return [self._check_ids(list(prompt))], False, False
        if all(isinstance(p, (list, tuple)) and all(_is_id(t) for t in p) for p in prompt):
            return [self._check_ids(list(p)) for p in prompt], False, True
        raise RequestError(f"{what} must be all texts or all token ids, not a mixture")

    def _encode(self, text: str, what: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(f"{self.artifact.path} has no tokenizer: give token ids instead of a text")
        if not text:
            raise RequestError(f"the {what} is empty")
        try:
            ids = list(self.tokenizer(text)["input_ids"])
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the {what} is not valid Unicode text: {error}") from error
        return self._check_ids(ids)

    def _check_ids(self, ids: list[int]) -> list[int]:
        if not ids:
            raise RequestError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= self.engine.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.engine.vocab_size)
            raise RequestError(f"token id {wrong} is outside the vocabulary: ids are 0 to {self.engine.vocab_size - 1}")
        limit = self.engine.context_length
        if limit is not None and len(ids) > limit:
            raise RequestError(f"the prompt has {len(ids)} tokens, the model's context holds {limit}")
        return ids


class _Request:
    """One call of generate or stream: prompts read, options checked, outputs waiting to be filled."""

    def __init__(self, model: Model, prompt: Any, options: GenerationOptions) -> None:
        self._model = model
        self._options = options
        self.prompts, self.is_text, self.is_batch = model._read(prompt)
        self._seeds = _seeds(options, len(self.prompts))
        if options.stop and model.tokenizer is None:
            raise RequestError(f"stop needs a tokenizer, and {model.artifact.path} has none")
        tokenizer = model.tokenizer if self.is_text or options.stop else None
        eos = frozenset() if options.ignore_eos else model.eos_token_ids
        self.outputs = [
            SequenceOutput(ids, _room(len(ids), options, model.engine.context_length), eos, tokenizer, options.stop)
            for ids in self.prompts
        ]

    def run(self) -> Iterator[None]:
        """Decode; yields after every step. Statistics are stored however it ends."""
        stats = GenerationStats()
        try:
            for rows in self._groups():
                yield from decode(
                    self._model.engine,
                    [self.prompts[i] for i in rows],
                    self._options,
                    [self.outputs[i] for i in rows],
                    [self._seeds[i] for i in rows],
                    stats,
                )
        finally:
            stats.finish_reasons = tuple(output.finish_reason or "stopped by the caller" for output in self.outputs)
            self._model._last = stats

    def _groups(self) -> list[list[int]]:
        rows = range(len(self.prompts))
        if self._model.engine.padding_is_exact:
            return [list(rows)]
        lengths = sorted({len(p) for p in self.prompts})
        return [[i for i in rows if len(self.prompts[i]) == length] for length in lengths]


def _room(prompt: int, options: GenerationOptions, context: int | None) -> int:
    """How many tokens to make at most."""
    wanted = options.max_new_tokens
    if context is None:
        return wanted or DEFAULT_NEW_TOKENS
    room = context - prompt
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt} tokens and fills the model's context of {context}: no room for new ones"
        )
    if wanted is None:
        return min(DEFAULT_NEW_TOKENS, room)
    if wanted > room:
        raise RequestError(
            f"max_new_tokens {wanted} and a prompt of {prompt} tokens exceed the model's context of {context}: at most {room} fit"
        )
    return wanted


def _seeds(options: GenerationOptions, count: int) -> list[int]:
    if isinstance(options.seed, tuple):
        if len(options.seed) != count:
            raise RequestError(f"seed has {len(options.seed)} entries for {count} prompts")
        return list(options.seed)
    if options.seed is not None:
        return [options.seed] * count
    source = torch.Generator()
    source.seed()  # from the operating system, so that the caller's global random state is left alone
    return torch.randint(2**62, (count,), generator=source).tolist()


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
