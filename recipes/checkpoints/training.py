"""What both training scripts share: how a small model begins, what a step does to it, what is kept between runs."""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 4096


def log(message: str) -> None:
    """Write one line to stderr."""
    print(message, file=sys.stderr, flush=True)


def make_model(config_class: type[PreTrainedConfig], *, rope_theta: float, **sizes: int) -> PreTrainedModel:
    """Return an untrained model in float32, with heads of 64 and tied embeddings; what its blocks add to the residual stream begins small.

    ``sizes`` are those of the configuration, by its names.
    """
    config = config_class(
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        attn_implementation="sdpa",
        **sizes,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(1.0 / math.sqrt(2 * config.num_hidden_layers))
    return model


class Trainer:
    """A model with its optimizers: Muon for the hidden matrices, AdamW for the embedding and the norms.

    ``make_muon`` makes the first from the matrices; ``scratch`` is the directory of the checkpoint a run goes on from.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        make_muon: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        lr_adam: float,
        scratch: Path,
    ) -> None:
        named = list(model.named_parameters())  # the head is the embedding, and so not among them
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        adam = torch.optim.AdamW(others, lr=lr_adam, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self.model = model
        self.optimizers = [make_muon(matrices), adam]
        self.path = scratch / "state.pt"
        # Before a scratch checkpoint is read, which has the rates of its last step.
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def step(self, factor: float) -> None:
        """Update the weights by the gradients gathered, at ``factor`` times the peak rates."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def save(self, at: dict[str, Any]) -> None:
        """Write the scratch checkpoint; ``at`` says where the run stands."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(
            {"model": self.model.state_dict(), "optimizers": optimizers, "at": at}, self.path.with_suffix(".tmp")
        )
        os.replace(self.path.with_suffix(".tmp"), self.path)

    def load(self) -> dict[str, Any] | None:
        """Read the scratch checkpoint, if there is one, and return where that run stood."""
        if not self.path.exists():
            return None
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["at"]


def write_model(model: PreTrainedModel, out: Path, **options: Any) -> None:
    """Write the model in bf16, replacing the files of ``out`` one by one; ``options`` are ``save_pretrained``'s."""
    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.config.dtype = torch.bfloat16
    stored.generation_config.do_sample = False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        stored.save_pretrained(scratch, **options)
        for path in sorted(Path(scratch).iterdir()):
            path.chmod(0o644)
            os.replace(path, out / path.name)


def command_line(
    description: str | None, out: Path, parents: Sequence[argparse.ArgumentParser] = (), **defaults: Any
) -> argparse.ArgumentParser:
    """Return a parser of the options both scripts have and those of ``parents``; ``defaults`` are those that differ."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw, parents=list(parents))
    parser.add_argument("--out", type=Path, default=out, help="model and tokenizer directory")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / f"{out.name}-training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=int, help="warm-up steps")
    parser.add_argument("--lr-muon", type=float, help="peak rate of the hidden matrices")
    parser.add_argument("--lr-adam", type=float, help="peak rate of embedding and norms")
    parser.add_argument("--threads", type=int, default=0, help="0: the default of torch")
    parser.add_argument("--checkpoint-every", type=int, help="steps between scratch checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last scratch checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the stored checkpoint, then stop")
    parser.set_defaults(**defaults)
    return parser
