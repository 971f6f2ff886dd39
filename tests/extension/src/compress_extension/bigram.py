"""A drafter with trained weights in one file: a low-rank bigram model of what its target writes, trained by a draft stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import nn

from compress.distill.draft.checks import Prospect, check_trained
from compress.distill.draft.config import DraftConfig
from compress.distill.draft.student import Student, round_trained
from compress.distill.draft.training import DraftMethod, DraftTraining
from compress.distill.draft.write import write_tensors
from compress.distill.train.data import TextRows
from compress.distill.train.losses import Objective
from compress.distill.train.teacher import Teacher
from runtime.config.settings import built
from runtime.drafting.config.target import Target
from runtime.drafting.drafters.base import Ask, Drafter
from runtime.errors import RequestError
from runtime.sampling.tree import ROOT, Tree

WEIGHTS = "bigram.safetensors"


class Bigram(nn.Module):
    """Logits of the next token from the last one alone: `out @ table[token]`.

    Args:
        vocabulary: of the target. rank: numbers between table and logits.
    """

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, rank)
        self.out = nn.Linear(rank, vocabulary, bias=False)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.table.weight.device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids `[...]` to logits `[..., vocabulary]`."""
        logits: torch.Tensor = self.out(self.table(ids))
        return logits


# ---------------------------------------------------------------- at runtime
@dataclass(eq=False)
class BigramDrafter(Drafter):
    """Proposes the likeliest successor of the last token, and of that one, ...

    Attributes:
        bigram: as it was trained.
    """

    name: ClassVar[str] = "bigram"
    source: ClassVar[str] = "heads"

    bigram: Bigram = built()

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> BigramDrafter:
        """See `Drafter.build`."""
        if facts["target"] != target.artifact.checkpoint.fingerprint():
            raise RequestError(f"drafter: {directory} is a draft of another target")
        bigram = Bigram(facts["vocabulary"], facts["rank"])
        bigram.load_state_dict(load_file(directory / WEIGHTS))
        return cls(bigram.requires_grad_(False), **settings)

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        """A chain for each."""
        return [self._chain(ask.text.tokens[-1], min(ask.depth, ask.nodes)) for ask in asks]

    def _chain(self, token: int, depth: int) -> Tree:
        tree, parent = Tree(), ROOT
        for _ in range(depth):
            chance, best = self.bigram(torch.tensor(token)).softmax(-1).max(-1)
            token = int(best)
            parent = tree.add(token, parent, float(chance))
        return tree


# ---------------------------------------------------------------- in training
class BigramConfig(DraftConfig):
    """A low-rank bigram model of what the artifact writes."""

    method: Literal["bigram"] = Field("bigram", description="Name of the method.")
    rank: int = Field(32, ge=1, description="Numbers between a token and the logits of the next.")
    quantize: Literal["none"] = Field("none", description="Its weights are stored in bfloat16.")


class BigramStudent(Student):
    """The bigram model as it learns; see `Student`."""

    def __init__(self, config: Any, rank: int, objective: Objective, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            bigram: Any = Bigram(config.vocab_size, rank)
        bigram.config = config
        super().__init__(bigram, objective)
        self.rank = rank

    @property
    def content(self) -> dict[str, Any]:
        """Of draft.json."""
        return {"vocabulary": self.vocabulary, "rank": self.rank}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Student.logits`."""
        found: torch.Tensor = self.draft(ids)
        return found

    def write(self, directory: Path, content: Mapping[str, Any], teacher: Teacher, held_out: TextRows) -> None:
        """See `Student.write`."""
        round_trained(self)
        write_tensors(directory, WEIGHTS, dict(self.draft.named_parameters()), {**content, **self.content})

    def read_back(self, directory: Path) -> None:
        """It was rounded when it was written."""

    def bytes_read(self, directory: Path, artifact: Path) -> float:
        """A row of the table, and all of the head."""
        return 2 * self.rank * (1 + self.vocabulary)


def make(making: DraftTraining, config: BigramConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    source = making.teacher.source.engine.module.config.get_text_config(decoder=True)
    return making.run(config, BigramStudent(source, config.rank, config.objective(), config.seed))


def check(config: BigramConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_trained(config, target)


METHOD = DraftMethod(
    name="bigram",
    config=BigramConfig,
    summary="a low-rank bigram model of what the artifact writes",
    paper="Shannon, A Mathematical Theory of Communication, 1948",
    make=make,
    check=check,
)
