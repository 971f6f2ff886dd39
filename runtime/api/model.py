"""Language model that `runtime.load` returns: text or token ids in, text, token ids, logits or scores out."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from runtime.api.base import GeneratingModel, Texts
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.export_directory import Export
from runtime.decoding.request import CausalRequest, Request
from runtime.decoding.scheduler import Scheduler
from runtime.decoding.turns import Caller
from runtime.drafting.speculation import Speculation
from runtime.engines.base import Chunk, Engine
from runtime.errors import RequestError
from runtime.sampling.options import GenerationOptions
from runtime.sampling.stats import GenerationStats

SCORE_CHUNK = 512  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Score:
    """How likely a text is: `log_likelihood` (natural log) of its `tokens` tokens after the first, each given all before it."""

    log_likelihood: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(-log-likelihood / tokens)."""
        return math.exp(-self.log_likelihood / self.tokens)


class Model(GeneratingModel):
    """A loaded causal language model. Made by `runtime.load`.

    Threads may call everything at once. On engines with a paged KV cache their calls decode together, in the same steps; on others
    they take turns on the engine, a step each. A stream that nobody reads holds nobody up. Results do not depend on it. After an
    exception or Ctrl-C in one call the others go on, and the model is as before.

    Attributes:
        tokenizer: the transformers tokenizer of the directory; None when it has none (token ids still work).
        artifact: the directory it came from.
        engine: what computes.
        eos_token_ids: tokens that end a text.
        speculation: drafts that are verified several tokens at a time; None: every step gives one token.
    """

    engine: Engine
    _session: Scheduler | None = None  # on an engine with rows

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        artifact: Artifact | Export,
        eos_token_ids: frozenset[int],
        speculation: Speculation | None = None,
        prefix_cache: int | None = None,
    ) -> None:
        super().__init__(engine, tokenizer, artifact, eos_token_ids)
        self.speculation = speculation
        self._scheduler = None if engine.lockstep else Scheduler(engine, self._turns, keep=prefix_cache)

    # ---------------------------------------------------------------- generation
    @overload
    def generate(self, prompt: Texts, **options: Any) -> Texts: ...
    @overload
    def generate(self, prompt: Sequence[Mapping[str, Any]], **options: Any) -> str: ...

    def generate(self, prompt: Any = None, **options: Any) -> Any:
        """Continue a prompt, or each of a batch of prompts of any number and lengths. Only what is new is returned.

        A long list is worked through with as many prompts at a time as fit, on engines with a paged KV cache letting one in
        whenever another ends and computing common beginnings once; others decode groups of similar lengths.

        Args:
            prompt: a text gives a text, a list of texts a list of texts, a list of token ids the new token ids, a list of such
                lists a list of them. A conversation, `[{"role": "user", "content": ...}, ...]`, goes through the tokenizer's chat
                template and gives the reply.
            options: max_new_tokens, temperature (0, the default: greedy), top_k, top_p, min_p, repetition_penalty, stop, seed,
                ignore_eos, cancel, progress, cache_memory, prefill_chunk, do_sample; see `runtime.sampling.options.GenerationOptions`.

        Raises:
            RequestError: an unknown option, a value out of range, an empty prompt or one that does not fit the context.
        """
        return self._request(prompt, options, "generate").complete(self._store)

    @overload
    def stream(self, prompt: str, **options: Any) -> Iterator[str]: ...
    @overload
    def stream(self, prompt: list[int], **options: Any) -> Iterator[int]: ...
    @overload
    def stream(self, prompt: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]: ...

    def stream(self, prompt: Any = None, **options: Any) -> Iterator[Any]:
        """Like `generate` for one prompt, but yields the text in parts (or the token ids one by one) while they are made.

        The parts together are exactly what `generate` returns: text is withheld while it may belong to an unfinished
        character or of a stop string.
        """
        request = self._request(prompt, options, "stream")
        if request.prompts.are_batch:
            raise RequestError("stream takes one prompt; use generate for a batch")
        return self._pieces(request)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation as `generate` reads it: through the chat template, with its generation prompt.

        Raises:
            RequestError: no chat template, messages that it rejects, or more tokens than the model's context.
        """
        return self._reader.encode_chat(messages)

    def session(self) -> Model:
        """The same model, whose calls keep the KV cache, so that only the part of a prompt that is new is computed.

        For conversations, and for many questions about one text. Engines with a paged cache have one for all calls, and keep its full
        pages (64 tokens) up to `runtime.load(prefix_cache=)`; while a session lives they keep all that fit. Transformers' modules keep
        the last sequence of a session if the cache is plain and can be cropped (no recurrent layers, no full sliding window) and there
        is no draft; otherwise whole prompts are computed again.

        Raises:
            RequestError: the model is computed by several ranks.
        """
        if self.engine.ranks is not None:
            raise RequestError(
                "session: ranks of tensor parallelism may forget one at different times; set prefix_cache of runtime.load"
            )
        found = copy.copy(self)
        if self._scheduler is not None:
            self._scheduler.keep_for(found)
        else:
            found._session = Scheduler(self.engine, self._turns, pages=1)
        found._last, found._own = GenerationStats(), threading.local()
        return found

    def _pieces(self, request: Request) -> Iterator[Any]:
        output, is_text = request.outputs[0], request.prompts.are_text
        done = 0
        with closing(request.run(self._store)) as steps:
            for _ in steps:
                new: Any = (output.text if is_text else output.tokens)[done:]
                if new:
                    done += len(new)  # more may come while these are read
                    yield from [new] if is_text else new

    def _request(self, prompt: Any, keywords: dict[str, Any], function: str) -> CausalRequest:
        if "images" in keywords:
            raise RequestError(
                f"images: {function} takes only text; load {self.artifact.path} with transformers' AutoModelForImageTextToText "
                "after `import runtime` (docs/models.md)"
            )
        with self._refusing_alike():
            options = GenerationOptions.from_keywords(keywords, function, self.eos_token_ids)
            decoding = replace(
                self._decoding(), speculation=self.speculation, scheduler=self._scheduler, session=self._session
            )
            return CausalRequest(decoding, self._reader.read(prompt), options, streams=function == "stream")

    # ---------------------------------------------------------------- logits and likelihood
    def logits(self, input_ids: torch.Tensor | Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of every position: token ids `[batch, seq]` to float32 `[batch, seq, vocab]` on the model's device."""
        with self._refusing_alike():
            ids = self._reader.read_rows(input_ids)
            self._agree(ids.tolist())
        return self._run(self.engine.logits, ids.to(self.engine.device))

    @overload
    def score(self, text: str | list[int]) -> Score: ...
    @overload
    def score(self, text: list[str] | list[list[int]]) -> list[Score]: ...

    def score(self, text: Any) -> Any:
        """Log-likelihood and perplexity of a text (or token ids), or of each of a list of them."""
        with self._refusing_alike():
            texts = self._reader.read(text, "text")
            for ids in texts.ids:
                if len(ids) < 2:
                    raise RequestError("a text needs at least two tokens to have a likelihood")
            self._agree(texts.ids)
        scores = [self._score(ids) for ids in texts.ids]
        return scores if texts.are_batch else scores[0]

    def _refusing_alike(self) -> AbstractContextManager[None]:
        """Around what reads a call: of ranks that compute the model together, all refuse it or none."""
        return nullcontext() if self.engine.ranks is None else self.engine.ranks.refusing_alike()

    def _agree(self, ids: Any) -> None:
        """RequestError, on all ranks that compute the model, where they are not asked for the same."""
        if self.engine.ranks is not None:
            self.engine.ranks.check_call("token ids", ids)

    def _score(self, ids: list[int]) -> Score:
        engine, caller = self.engine, Caller(self._turns)
        prefix = len(engine.prefix)
        ids = [*engine.prefix, *ids]
        pages = range(-(-len(ids) // engine.page_size))
        pool = caller.run(engine.new_pages, len(pages))
        total = 0.0
        size = min(SCORE_CHUNK, engine.most_rows)
        for start in range(0, len(ids) - 1, size):
            end = min(start + size, len(ids) - 1)
            logits = caller.run(engine.read, pool, [Chunk(ids[start:end], start, pages)], True)
            following = torch.tensor(ids[start + 1 : end + 1], device=self.engine.device)
            chosen = torch.log_softmax(logits, dim=-1).gather(-1, following[:, None])
            total += float(chosen[max(0, prefix - start) :].double().sum())
        return Score(total, len(ids) - prefix - 1)

    # ---------------------------------------------------------------- facts
    @property
    def stats(self) -> dict[str, Any]:
        """As `GeneratingModel.stats`, and `kv_cache`, how keys and values are compressed (None: they are not);
        `kv_cache_read_share`, the share of them that steps have read (None: the policy has no selection); `drafter`, how drafts are
        made, verified and accepted (None: there are none).
        """
        policy = self.engine.policy
        return {
            **super().stats,
            "kv_cache": None if policy is None else policy.describe(),
            "kv_cache_read_share": self._last_stats().read_share,
            "drafter": None if self.speculation is None else self.speculation.describe(),
        }
