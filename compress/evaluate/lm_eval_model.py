"""A model of ours as lm-eval sees one. Imports lm-eval, so it is imported only after `lm_eval.require_lm_eval()`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from runtime.errors import RequestError

if TYPE_CHECKING:
    from runtime.api.model import Model

_DEFAULT_CONTEXT = 2048
_DEFAULT_NEW_TOKENS = 256
_Scored = tuple[Any, list[int], list[int]]


class RuntimeLM(TemplateLM):
    """Answers lm-eval's three kinds of request with `Model.logits` and `Model.generate`.

    Args:
        model: with a tokenizer that has an end-of-text token (it stands in where a request has no context).
        batch_size: sequences in one forward pass.
    """

    def __init__(self, model: Model, batch_size: int = 8) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.batch_size = batch_size
        self.max_length = model.engine.context_length or _DEFAULT_CONTEXT
        if model.tokenizer.eos_token_id is None and model.tokenizer.bos_token_id is None:
            raise RequestError("the tokenizer has neither a start nor an end token, and lm-eval needs one of them")

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token; a tokenizer without one gives its beginning-of-sequence token."""
        eos = self.tokenizer.eos_token_id
        return int(eos if eos is not None else self.tokenizer.bos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes text without context: beginning of sequence, or else end of sequence."""
        bos = self.tokenizer.bos_token_id
        return int(bos if bos is not None else self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Name in lm-eval's cache keys: the artifact's path, with `__` for `/`."""
        return str(self.model.artifact.path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a string; special tokens are added unless `add_special_tokens` is False."""
        special = True if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special, verbose=False)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one string in the tokenizer's chat template."""
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, **options))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows as long as the model's context."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pairs: list[_Scored] = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[_Scored], **_: Any) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether greedy decoding would say it) of each (name, context, continuation)."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Longest first: rows of a batch are about equally long, and memory runs out at once or never.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for batch in _batches(order, self.batch_size):
            # The last token is only predicted; what does not fit the context is cut on the left.
            rows = [(requests[i][1] + requests[i][2])[-(self.max_length + 1) :] for i in batch]
            length = max(len(row) for row in rows) - 1
            # Padding on the right is never seen by the tokens before it.
            inputs = torch.full((len(rows), length), self.eot_token_id, dtype=torch.int64)
            for number, row in enumerate(rows):
                inputs[number, : len(row) - 1] = torch.tensor(row[:-1])
            logits = self.model.logits(inputs)
            for number, (i, row) in enumerate(zip(batch, rows, strict=True)):
                wanted = min(len(requests[i][2]), len(row) - 1)
                targets = torch.tensor(row[len(row) - wanted :], device=logits.device)
                scores = torch.log_softmax(logits[number, len(row) - 1 - wanted : len(row) - 1], dim=-1)
                chosen = scores.gather(-1, targets[:, None]).double().sum()
                results[i] = (float(chosen), bool((scores.argmax(-1) == targets).all()))
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string. Requests with the same settings are decoded together."""
        results = [""] * len(requests)
        arguments = [request.args for request in requests]
        keys = [json.dumps(settings, sort_keys=True) for _, settings in arguments]
        order = sorted(range(len(requests)), key=lambda i: (keys[i], -len(arguments[i][0])))
        for key, group in itertools.groupby(order, key=lambda i: keys[i]):
            settings = json.loads(key)
            stop = settings.get("until") or []
            stop = [stop] if isinstance(stop, str) else list(stop)
            limit = min(int(settings.get("max_gen_toks", _DEFAULT_NEW_TOKENS)), self.max_length - 1)
            options: dict[str, Any] = {"max_new_tokens": limit, "stop": stop}
            if settings.get("do_sample"):
                options["temperature"] = float(settings.get("temperature", 1.0))
                options["top_p"] = float(settings.get("top_p", 1.0))
            for batch in _batches(list(group), self.batch_size):
                prompts = [self._prompt(arguments[i][0], self.max_length - limit) for i in batch]
                for i, ids in zip(batch, self.model.generate(prompts, **options), strict=True):
                    results[i] = _until(self.tokenizer.decode(ids, skip_special_tokens=True), stop)
        return results

    def _prompt(self, text: str, room: int) -> list[int]:
        return (self.tok_encode(text) or [self.prefix_token_id])[-room:]


def _until(text: str, stop: list[str]) -> str:
    """The text before the first stop string. Token prompts give tokens, and the last of these may reach beyond it."""
    ends = [text.find(word) for word in stop if word and word in text]
    return text[: min(ends)] if ends else text


def _batches(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
