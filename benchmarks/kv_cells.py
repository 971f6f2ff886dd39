"""One cell of `kv_quality.py`: a cache policy at a budget, on retrieval items and on texts, with the bytes that the cache took."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.kv_cache.cache import CompressedCache
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.storage.plan import StoragePlan


@dataclass(frozen=True)
class Method:
    """A policy whose budget is still open.

    Attributes:
        name: in tables.
        policy: of the cache; where it evicts, the ratio is set for the budget.
        peers: presses of kvpress that are their version of the same.
        whole: its ratio is the budget, as the peers' is: the share of the tokens, before any rounding to pages.
        fixed: the policy has one size, whatever the budget (storage alone): it counts at every budget that it fits in.
        needs: what calibration must find for it: "gates", "channels", "prefix_tokens".
        reads: the budget is the share of the tokens that a step reads, of a cache that is kept whole.
        decodes: it evicts while decoding: the budget is what it keeps of the tokens of a whole text.
    """

    name: str
    policy: dict[str, Any]
    peers: tuple[str, ...] = ()
    whole: bool = False
    fixed: bool = False
    needs: tuple[str, ...] = ()
    reads: bool = False
    decodes: bool = False

    def at(self, ratio: float | None, calibrated: dict[str, Any] | None = None, tokens: int | None = None) -> Policy:
        """The policy that keeps (or reads) this share of the tokens, or keeps so many."""
        policy = copy.deepcopy(self.policy)
        if calibrated is not None:
            policy["calibrated"] = calibrated
        if tokens is not None:
            policy["evict"]["tokens"] = tokens
        elif ratio is not None:
            policy.setdefault("select" if self.reads else "evict", {})["ratio"] = ratio
        return Policy.parse(policy, self.name)

    def serves(self, job: dict[str, Any]) -> bool:
        """Whether there is something to see: what happens while decoding shows where a context is followed by many steps."""
        if job["steps"]:
            return self.reads or self.decodes
        return not self.decodes and (not self.reads or (bool(job["items"]) and not job["query_aware"]))


class Evaluator:
    """Runs policies on one model.

    Args:
        model: of transformers, prepared for compressed caches.
        floats: what floats of a cache are held in; a plain one would hold them so too.
    """

    def __init__(self, model: Any, floats: torch.dtype) -> None:
        self.model, self.floats = model, floats
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * size  # of a token

    def full_bytes(self, tokens: int, policy: Policy) -> int:
        """Of a plain cache of so many tokens, that holds floats as this policy does."""
        return self._numbers * tokens * self.held_in(policy).itemsize

    def held_in(self, policy: Policy) -> torch.dtype:
        """Floats alone are held as the peers hold them, in the model's dtype: the share of the bytes is the same in any."""
        dtype: torch.dtype = self.model.dtype
        return dtype if policy.draft().storage == StoragePlan() else self.floats

    def fill(self, ids: list[int], policy: Policy) -> tuple[torch.Tensor, CompressedCache]:
        """Logits of the last position, and the cache after the prompt."""
        floats = str(self.held_in(policy)).removeprefix("torch.")
        cache = CompressedCache(self.model, replace(policy, floats=floats).plan())
        ids = [*policy.prefix_tokens, *ids]
        logits = self.model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
        return logits, cache

    def ratio_for(self, method: Method, ids: list[int], budget: float) -> float | None:
        """The largest share of tokens with which the cache of `ids` takes at most `budget` of a plain one; None: there is none."""
        limit = budget * self.full_bytes(len(ids), method.at(1.0))

        def size(ratio: float) -> int:
            return self.fill(ids, method.at(ratio))[1].nbytes

        whole = size(1.0)
        if whole <= limit:
            return 1.0
        low, high = 0.02, 1.0
        few = size(low)
        if few > limit:
            return None
        # Bytes grow almost evenly with the share, in steps of pages: a guess, then halves of what is left around it.
        guess = low + (high - low) * (limit - few) / (whole - few)
        for step in (0.99, 0.96, 0.92):
            if size(guess * step) <= limit:
                low = guess * step
                break
            high = guess * step
        middle = (low + high) / 2
        return middle if high < 1.0 and size(middle) <= limit else low

    def retrieval(self, items: list[dict[str, Any]], policy: Policy, aware: bool) -> Iterator[dict[str, Any]]:
        """Right answers and bytes, item by item."""
        for item in items:
            started = time.perf_counter()
            correct, sizes = 0, []
            logits, cache = (None, None) if aware else self.fill(item["context"], policy)
            for question in item["questions"]:
                if aware:
                    logits, mine = self.fill(item["context"] + question["ids"], policy)
                else:
                    mine = copy.deepcopy(cache)
                sizes.append(mine.nbytes)
                ids = torch.tensor([question["ids"]])
                if not aware:
                    logits = self.model(ids, past_key_values=mine).logits[0, -1]
                answer = []
                for _ in question["answer"]:
                    answer.append(int(logits.argmax()))
                    if len(answer) < len(question["answer"]):
                        logits = self.model(torch.tensor([answer[-1:]]), past_key_values=mine).logits[0, -1]
                correct += answer == question["answer"]
            yield {
                "id": item["id"], "correct": correct, "asked": len(item["questions"]), "cache_bytes": sum(sizes) / len(sizes),
                "full_bytes": self.full_bytes(len(item["context"]) + aware * len(item["questions"][0]["ids"]), policy),
                "reads": read_share(mine), "seconds": time.perf_counter() - started,
            }  # fmt: skip

    def texts(self, items: list[dict[str, Any]], policy: Policy) -> Iterator[dict[str, Any]]:
        """Negative log-likelihood of what follows the prompts, all in one forward over the compressed cache."""
        for item in items:
            started = time.perf_counter()
            prompt, rest = item["ids"][: item["prompt"]], item["ids"][item["prompt"] :]
            _, cache = self.fill(prompt, policy)
            size = cache.nbytes
            # The first token after the prompt comes out of the whole prefill: what is scored is predicted from the compressed cache.
            logits = self.model(torch.tensor([rest[:-1]]), past_key_values=cache).logits[0].float()
            nll = torch.nn.functional.cross_entropy(logits, torch.tensor(rest[1:]), reduction="sum")
            yield {
                "id": item["id"], "nll": float(nll), "tokens": len(rest) - 1, "cache_bytes": size,
                "full_bytes": self.full_bytes(len(prompt), policy), "seconds": time.perf_counter() - started,
            }  # fmt: skip

    def steps(self, items: list[dict[str, Any]], policy: Policy) -> Iterator[dict[str, Any]]:
        """Negative log-likelihood of what follows short prompts, token by token: what happens to the cache while decoding counts."""
        for item in items:
            started = time.perf_counter()
            logits, cache = self.fill(item["ids"][: item["prompt"]], policy)
            nll, rest = 0.0, item["ids"][item["prompt"] :]
            for token in rest:
                nll -= float(logits.float().log_softmax(-1)[token])
                logits = self.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
            yield {
                "id": item["id"], "nll": nll, "tokens": len(rest), "cache_bytes": cache.nbytes, "reads": read_share(cache),
                "full_bytes": self.full_bytes(len(item["ids"]), policy), "seconds": time.perf_counter() - started,
            }  # fmt: skip


def read_share(cache: CompressedCache) -> float | None:
    """Of the tokens held, those that steps read, all layers; None where steps read everything."""
    return None if cache.reads is None else cache.reads.share()


class Ratios:
    """Shares of tokens that fit budgets, kept in a file: bytes depend on lengths, not on what the prompt says.

    Args:
        evaluator: that measures them.
        file: where they are kept.
        model: what is part of their names.
    """

    def __init__(self, evaluator: Evaluator, file: Path, model: str) -> None:
        self._evaluator, self._file, self._model = evaluator, file, Path(model).name
        self._known: dict[str, float | None] = json.loads(file.read_text()) if file.exists() else {}

    def of(self, method: Method, ids: list[int], budget: float) -> float | None:
        """As `Evaluator.ratio_for`."""
        name = f"{self._model} {method.name} {len(ids)} {budget}"
        if name not in self._known:
            self._known[name] = self._evaluator.ratio_for(method, ids, budget)
            self._file.write_text(json.dumps(self._known, indent=1))
        return self._known[name]
