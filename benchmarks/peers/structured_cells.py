"""One peer of structured_peers.py: its texts, its model, its cells, and what a cell tells of a model."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

LENGTH, WINDOWS, MULTIPLE = 256, 128, 32
# Of a text: as many times the tokens of the rows as `compress` reads, at least so many.
ENOUGH, ENOUGH_TOKENS = 16, 2_000_000


def tokenizer_of(model: Path) -> Any:
    """A checkpoint's tokenizer, in transformers 4 too, which does not know the class that its configuration names."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))


def encoded(text: Path, model: Path, most: int) -> torch.Tensor:
    """Tokens of a text's documents, end to end, each with an end-of-text token; no document is begun after `most`."""
    tokenizer = tokenizer_of(model)
    mark = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    end = tokenizer.convert_tokens_to_ids(mark)
    ids: list[int] = []
    for document in text.read_text(encoding="utf-8").split(mark):
        if document.strip():
            ids += tokenizer(document.strip("\n"), verbose=False)["input_ids"] + [end]
            if len(ids) >= most:
                break
    return torch.tensor(ids)


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    """Rows of `LENGTH`, without overlap."""
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)


class Bench:
    """One peer: its texts, its model, its cells, which go to `out`."""

    def __init__(self, arguments: argparse.Namespace, out: TextIO) -> None:
        self.out = out
        self.peer, self.model = arguments.peer, arguments.model
        self.config = json.loads((self.model / "config.json").read_text())
        self.mixture = "num_experts_per_tok" in self.config
        self.heldout = rows_of(encoded(arguments.heldout, self.model, WINDOWS * LENGTH))[:WINDOWS]
        most = max(ENOUGH * arguments.rows * LENGTH, ENOUGH_TOKENS)
        windows = rows_of(encoded(arguments.text, self.model, most))
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        self.rows = windows[order[: arguments.rows]]

    def load(self) -> Any:
        """The checkpoint, in float32."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def kept(self, ratio: float) -> int:
        """Channels that `compress` keeps."""
        width: int = self.config["intermediate_size"]
        return round(width * (1 - ratio) / MULTIPLE) * MULTIPLE

    @torch.inference_mode()
    def perplexity(self, model: Any) -> float:
        """Of the held-out rows, every token but a row's first."""
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        total = 0.0
        for ids in self.heldout.split(8):
            logits = model(ids, use_cache=False).logits[:, :-1].float()
            found = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
            total -= float(found.double().sum())
        return math.exp(total / self.heldout[:, 1:].numel())

    def gradients(self, model: Any) -> None:
        """Of the mean loss over the calibration rows, summed over batches."""
        model.zero_grad()
        for ids in self.rows.split(8):
            model(ids, labels=ids, use_cache=False).loss.backward()

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Calibration rows as most peers read them."""
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in self.rows.split(8)]

    def cell(self, method: str, remove: str, ratio: float, prune: Callable[[Any], Any], **notes: Any) -> None:
        """Load, prune, measure, print, `notes` too. `prune` gives back the model, or None for the one that it was given."""
        torch.manual_seed(0)
        model = self.load()
        began = time.perf_counter()
        model = prune(model) or model
        seconds = time.perf_counter() - began
        model = model.eval()
        whole = remove == "weights" or self.mixture  # what is zero is anywhere, and all of it is stored
        left, zeroed = (sum(each.numel() for each in model.parameters()), False) if whole else parameters(model)
        found: dict[str, Any] = {
            "peer": self.peer, "version": version(self.peer), "method": method, "remove": remove, "ratio": ratio,
            "perplexity": self.perplexity(model), "parameters_after": left, "seconds": round(seconds, 2),
        }  # fmt: skip
        notes |= {"zeroed": True} if zeroed else {}
        if not self.mixture:
            notes |= {"zeros": round(zeros(model), 4)} if remove == "weights" else shape(model)
        print(json.dumps(found | notes), file=self.out, flush=True)


def version(peer: str) -> str:
    """Of the installed peer."""
    return importlib.metadata.version("transformers" if peer == "none" else peer)


def parts(model: Any) -> Iterator[tuple[Any, Any]]:
    """Attention and MLP of each layer."""
    for layer in model.model.layers:
        yield layer.self_attn, layer.mlp


def shape(model: Any) -> dict[str, Any]:
    """Channels and heads that every layer has left."""
    channels, heads = [], []
    for attention, mlp in parts(model):
        channels.append(int((mlp.down_proj.weight != 0).any(0).sum()))
        used = (attention.o_proj.weight != 0).any(0).reshape(-1, attention.head_dim).any(1)
        heads.append(int(used.sum()))
    return {"channels": channels, "heads": heads}


def parameters(model: Any) -> tuple[int, bool]:
    """Parameters of the model, and whether some of them were left out of the count: whole channels or groups of heads that are zero."""
    count = sum(each.numel() for each in model.parameters())
    spare = 0
    for attention, mlp in parts(model):
        gone = int((mlp.down_proj.weight == 0).all(0).sum())
        spare += gone * 3 * mlp.down_proj.out_features
        width, head = attention.o_proj.out_features, attention.head_dim
        groups = attention.k_proj.out_features // head
        dead = (attention.o_proj.weight == 0).all(0).reshape(groups, -1).all(1)
        share = attention.o_proj.in_features // groups
        spare += int(dead.sum()) * width * 2 * (share + head)
    return count - spare, bool(spare)


def zeros(model: Any) -> float:
    """Share of the weights of linear layers that are zero."""
    weights = [
        m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not n.endswith("lm_head")
    ]
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
