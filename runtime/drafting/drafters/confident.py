"""SpecDec++: a draft model with a head that foresees acceptance, and stops when a token will probably be rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from runtime.config.settings import ConfigError, Share, built
from runtime.drafting.config.target import UnfitError
from runtime.drafting.draft_cache import DraftCache, Slot
from runtime.drafting.drafters.base import Ask, Drafter
from runtime.drafting.drafters.draft_model import DraftModel, read_tensors
from runtime.drafting.drafters.model import Candidates, Chain, ModelDrafter
from runtime.engines.base import Chunk
from runtime.errors import ArtifactError, RequestError
from runtime.sampling.tree import Tree

FILE = "accept_head.safetensors"
GREEDY, DRAWN = 0, 1  # its outputs


class AcceptHead:
    """From a draft's state and the probability of the token that it proposes to how likely the target accepts it.

    A residual layer with SiLU on the state, then a linear layer over the result, the log-probability of the token and the entropy of the
    draft's distribution; one output for greedy decoding, one for sampling.

    Args:
        tensors: "mix" `[h, h]`, "mix_bias" `[h]`, "out" `[2, h + 2]`, "out_bias" `[2]`, float.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: tensors[name].float() for name in ("mix", "mix_bias", "out", "out_bias")}

    def to(self, device: torch.device) -> AcceptHead:
        """The head on a device."""
        return AcceptHead({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def __call__(self, states: torch.Tensor, log_chance: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, 2]` of being accepted.

        Args:
            states: float `[rows, h]`, what the draft's head reads.
            log_chance: `[rows]`, log-probability of the proposed token. entropy: `[rows]`, of the distribution, in nats.
        """
        tensors, states = self.tensors, states.float()
        mixed = states + torch.nn.functional.silu(states @ tensors["mix"].T + tensors["mix_bias"])
        features = torch.cat([mixed, log_chance[:, None].float(), entropy[:, None].float()], 1)
        return features @ tensors["out"].T + tensors["out_bias"]

    @classmethod
    def load(cls, path: Path, hidden: int) -> AcceptHead:
        """From a draft's directory; ArtifactError where it does not fit a draft of this width."""
        tensors = read_tensors(path / FILE)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes.get("mix") != (hidden, hidden) or shapes.get("out") != (2, hidden + 2):
            raise ArtifactError(f"{path / FILE} is not a head for states of {hidden}")
        return cls(tensors)


class StateCache(DraftCache):
    """Paged cache that also gives what the head read after the last token of each sequence.

    Attributes:
        states: float32 `[slots, hidden]` of the last `feed`.
    """

    states: torch.Tensor

    def feed(self, slots: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        logits, self.states = self._ends(slots, tokens)
        return logits

    def _pass(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, ...]:
        logits, hidden = self._engine.verify(self._memory, chunks, hidden=True)
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1
        return logits, hidden[ends.to(hidden.device)]

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self._engine.device


@dataclass(eq=False)
class Confident(ModelDrafter):
    """As a chain, but the chances of its tokens are those that a trained head foresees, and the chain ends when one of its tokens will be
    rejected with a probability above `threshold`.

    Source: Huang et al., SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths, arXiv 2405.19715. The head here also
    reads the probability of the proposed token, so that it can be asked before the draft has read it.

    Attributes:
        head: the trained head.
        threshold: probability that at least one token is rejected.
    """

    name: ClassVar[str] = "confident"
    fact: ClassVar[str | None] = "accept_head"
    confidence: float = built(0.0)
    head: AcceptHead = built(kw_only=True)
    threshold: Share = 0.7

    @classmethod
    def over(cls, draft: DraftModel, directory: Path, candidates: Candidates, **settings: Any) -> Drafter:
        if not (directory / FILE).is_file():
            raise ConfigError(("method",), f"{directory} has no head that foresees acceptance; use chain")
        config = getattr(getattr(draft.engine, "module", None), "config", None)
        if draft.engine.lockstep or config is None:
            text = f"confident needs the states of the draft, which {draft.engine.description} does not give"
            raise UnfitError(("method",), text)
        head = AcceptHead.load(directory, int(config.hidden_size))
        return cls(StateCache(draft.engine), candidates, weights=draft.engine.weight_bytes, head=head, **settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cache, StateCache):
            raise RequestError("confident needs a draft whose engine gives its states, such as the decoder in C")
        self.head = self.head.to(self.cache.device)

    def draft(self, asks: Sequence[Ask]) -> list[Tree]:
        return super().draft([replace(ask, least=max(ask.least, 1 - self.threshold)) for ask in asks])

    @torch.inference_mode()
    def choose(self, chains: Sequence[Chain], logits: torch.Tensor) -> list[tuple[int, float]]:
        chosen = super().choose(chains, logits)
        states = cast(StateCache, self.cache).states
        log_q = torch.log_softmax(logits.float(), -1)
        entropy = -(log_q.exp() * log_q).sum(-1)
        log_chance = torch.tensor([chance for _, chance in chosen], device=states.device).clamp_min(1e-9).log()
        found = torch.sigmoid(self.head(states, log_chance, entropy)).tolist()
        return [
            (token, row[GREEDY if chain.ask.draw is None else DRAWN])
            for chain, (token, _), row in zip(chains, chosen, found, strict=True)
        ]
