"""DuoAttention: a gate for every key head, trained to tell heads that look far back from those that need a window only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from compress.core.progress import Progress
from compress.kv_cache.attention import AttentionCall, watching
from compress.kv_cache.statistics import hidden_states
from compress.kv_cache.view import CalibrationView, Found
from runtime.errors import RequestError
from runtime.kv_cache.shape import Shape
from runtime.modeling.layer_sizes import uniform
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NO_PREFIX = (
    "gates are trained on rows without the prefix that static activations are good behind; make the activations dynamic"
)
"""Why gates and such activations do not go together."""


# Gradients through deep models without keeping all of a forward.

KEEP = 1 << 30


@contextmanager
def _forwards(modules: Sequence[nn.Module], replaced: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Within, each module's `forward` is what `replaced(module)` gives."""
    for module in modules:
        module.forward = replaced(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # the class's own again


def recomputed(model: PreTrainedModel, tokens: int) -> AbstractContextManager[None]:
    """Within, blocks are computed anew in the backward pass where what they would keep of `tokens` tokens is more than `KEEP` bytes."""
    config: Any = uniform(model.config).get_text_config(decoder=True)
    # Roughly what a block of attention and a gated MLP saves for its backward pass.
    widths = 16 * config.hidden_size + 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if 4 * tokens * widths * config.num_hidden_layers <= KEEP:
        return nullcontext()
    from torch.utils.checkpoint import checkpoint

    anew = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return _forwards(list(find_blocks(model)[1]), lambda block: partial(anew, block.forward))


# Synthetic sequences that cannot be continued without looking far back: random keys in a passage, asked for at its end.

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
MOST_KEYS = len(_ORDINALS)


@dataclass(frozen=True)
class Passkeys:
    """Draws rows `start passage-with-(label key)s (label key)...`, the second time in random order; all rows are equally long.

    Attributes:
        stream: int64 `[n]`, text that passages are cut from.
        alphabet: int64 `[m]`, tokens that keys are drawn from.
        length: of a row.
        labels: what stands before each key; None: two random tokens, anew in every row.
        keys: how many.
        key_tokens: length of each.
        start: tokens that every row begins with.
    """

    stream: torch.Tensor
    alphabet: torch.Tensor
    length: int
    labels: tuple[tuple[int, ...], ...] | None
    keys: int
    key_tokens: int
    start: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: torch.Tensor, tokenizer: Any, length: int) -> Passkeys:
        """Rows of `length` tokens from calibration rows `[n, *]`; without a tokenizer (None) keys have random labels.

        Raises:
            RequestError: fewer than 16 different tokens in the rows.
        """
        special, labels, start = set(), None, ()
        if tokenizer is not None:
            special = set(tokenizer.all_special_ids)
            texts = [f"\nThe {name} key is: " for name in _ORDINALS]
            labels = tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
            begins = tokenizer("x")["input_ids"][:1]
            start = tuple(begins) if begins and begins[0] == tokenizer.bos_token_id else ()
        ids: torch.Tensor = cast(Any, torch).unique(rows)
        alphabet = ids[~torch.isin(ids, torch.tensor(sorted(special), dtype=torch.int64))]
        if len(alphabet) < 16:
            raise RequestError(f"calibration rows have {len(alphabet)} different tokens; gates need at least 16")
        key_tokens = min(32, max(2, length // 32))
        label = max(map(len, labels)) if labels else 2
        if labels and length < 4 * (key_tokens + label):
            labels, label = None, 2
        keys = min(MOST_KEYS, max(1, length // (4 * (key_tokens + label))))
        return cls(rows.reshape(-1), alphabet, length, labels, keys, key_tokens, start)

    def draw(self, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ids and bool `[batch, length]`; True: the next token is one of a key that is asked for."""
        drawn = [self._row(generator) for _ in range(batch)]
        return torch.stack([ids for ids, _ in drawn]), torch.stack([asked for _, asked in drawn])

    def _row(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [self._pair(number, generator) for number in range(self.keys)]
        again = [pairs[index] for index in torch.randperm(self.keys, generator=generator)]
        fill = self.length - len(self.start) - 2 * sum(len(label) + len(key) for label, key in pairs)
        stream = self.stream.repeat(-(-fill // len(self.stream)))
        begin = int(torch.randint(len(stream) - fill + 1, (), generator=generator))
        passage = stream[begin : begin + fill]
        cuts = torch.randint(fill + 1, (self.keys,), generator=generator).sort().values.tolist()
        parts = [torch.tensor(self.start, dtype=torch.int64)]
        for (label, key), low, high in zip(pairs, [0, *cuts], cuts, strict=False):
            parts += [passage[low:high], label, key]
        parts.append(passage[cuts[-1] :])
        asked = [torch.zeros(sum(map(len, parts)), dtype=torch.bool)]
        for label, key in again:
            parts += [label, key]
            asked += [torch.zeros(len(label), dtype=torch.bool), torch.ones(len(key), dtype=torch.bool)]
        return torch.cat(parts), torch.cat(asked).roll(-1)  # who sees a token predicts the next

    def _pair(self, number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        def some(count: int) -> torch.Tensor:
            return self.alphabet[torch.randint(len(self.alphabet), (count,), generator=generator)]

        label = some(2) if self.labels is None else torch.tensor(self.labels[number], dtype=torch.int64)
        return label, some(self.key_tokens)


POOL = 24  # batches that are gone through again and again: gates are few, and the full model runs once for each
SCALE_BATCHES = 4  # that the loss of an all-streaming model is measured on
TEST_BATCHES = 8  # that recall is measured on
TIE_BREAK = 1e-3


@dataclass(frozen=True)
class GateOptions:
    """How gates are trained.

    Attributes:
        sinks: first tokens that a streaming head sees.
        recent: newest tokens that it sees. Both are less in the training of models with few positions, unless `length` is given.
        length: of the synthetic rows; None: 512, or four times what a streaming head sees, as far as the model's positions reach.
        steps: at most.
        batch: rows a step.
        rate: of Adam.
        l1: what a gate of 1 costs, where streaming in all heads costs 1 in all: heads whose loss is felt less are closed.
        window: steps that are compared with the same number before them; training stops once gates have settled. A whole pool, so that
            both have seen the same rows.
        settled: the mean of a gate over a window may differ so much from that of the window before.
    """

    sinks: int = 16
    recent: int = 64
    length: int | None = None
    steps: int = 150
    batch: int = 2
    rate: float = 0.05
    l1: float = 0.3
    window: int = POOL
    settled: float = 0.02


@dataclass
class GatedAttention:
    """g * full attention + (1 - g) * streaming attention, g by layer and key head.

    Attributes:
        gates: `[layers, kv_heads]`; None: full attention.
    """

    gates: torch.Tensor | None
    sinks: int
    recent: int

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        full = call.full()
        if self.gates is None:
            return full
        gate = self.gates[call.layer].repeat_interleave(call.groups)[:, None, None]
        # In the gates' float32: a bfloat16 near 1 does not know the small steps that they move in.
        return (gate * full + (1 - gate) * call.streaming(self.sinks, self.recent)).to(full.dtype)


def calibrate(view: CalibrationView) -> Found:
    """Train gates on passkeys hidden in calibration text (DuoAttention, arXiv 2410.10819); the model is left as it is.

    Gates begin at 1 and are clipped to [0, 1] after every step. The loss is the squared distance between the final hidden states of
    the full and of the gated model where a key is recalled, plus an L1 penalty on the gates. Unlike the paper's, the distance is
    measured in units of what streaming in all heads costs, and the penalty is a mean over the heads, so that one strength suits models
    of any width and depth. What is returned is the mean of the gates over the last steps, heads with equal gates (0, mostly) in the
    order in which they were closed.

    Args:
        view: without options of gates, streaming heads see the window that the policy gives them, where it says so.

    Returns:
        {"gates": (`[layer][kv_head]` in [0, 1], 1: a retrieval head; facts)}. Facts: "steps"; "losses", one a step: the distance to the
        full model's hidden states, 1 where all heads stream; "histogram": gates in each tenth of [0, 1]; "recall": share of the keys'
        tokens that are predicted by the "full" model, the one with "half" of its heads streaming (those with the lowest gates), and the
        all-"streaming" one; "length" of the rows; "window": sinks and recent tokens that streaming heads saw; "seconds".

    Raises:
        RequestError: rows of the length asked for do not fit the model, or tell no head from another.
    """
    began, default = time.perf_counter(), GateOptions()
    window = {key: int(getattr(view.method, key, getattr(default, key))) for key in ("sinks", "recent")}
    options, length = _fitting(view.model, view.options.gates or GateOptions(**window))
    data = Passkeys.of(view.rows, view.tokenizer, length)
    attention = GatedAttention(None, options.sinks, options.recent)
    with watching(view.model, attention), recomputed(view.model, options.batch * length):
        trainer = _Trainer(view.model, attention, data, options, torch.Generator().manual_seed(view.seed))
        gates, losses = trainer.train(view.progress)
        recall = trainer.recall(gates)
    tenths = (gates.double() * 10).long().clamp(max=9).flatten()
    facts = {
        "steps": len(losses),
        "losses": [round(loss, 5) for loss in losses],
        "histogram": tenths.bincount(minlength=10).tolist(),
        "recall": {name: round(share, 4) for name, share in recall.items()},
        "length": length,
        "window": [options.sinks, options.recent],
        "seconds": round(time.perf_counter() - began, 2),
    }
    return {"gates": (gates.tolist(), facts)}


def _fitting(model: PreTrainedModel, options: GateOptions) -> tuple[GateOptions, int]:
    """The options with a window that rows are long enough to tell heads by, and the length of the rows."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    seen, length = options.sinks + options.recent, options.length
    if length is None:
        wanted = max(512, 4 * seen)
        length = wanted if limit is None else min(wanted, limit)
        if length < 4 * seen:  # nobody chose the length, and heads that look far back do so in short rows too
            sinks = min(options.sinks, max(1, length // 16))
            options = replace(options, sinks=sinks, recent=max(1, length // 4 - sinks))
    elif limit is not None and length > limit:
        raise RequestError(f"gates: rows of {length} tokens are more than the {limit} positions of the model")
    elif length < 2 * seen:
        raise RequestError(
            f"gates: rows of {length} tokens are too short to tell heads that see {seen} tokens from others; "
            f"they need {2 * seen}, so lower sinks or recent"
        )
    if length < 16:
        raise RequestError(f"gates: rows of {length} tokens have no room for keys; they need at least 16")
    return options, length


@dataclass
class _Trainer:
    model: PreTrainedModel
    attention: GatedAttention
    data: Passkeys
    options: GateOptions
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self._pool: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def train(self, progress: Progress | None) -> tuple[torch.Tensor, list[float]]:
        """Gates `[layers, kv_heads]` on the CPU, and the distance of each step."""
        options = self.options
        if progress is not None:
            progress.phase("retrieval heads", -(-options.steps // options.window))
        unit = self._unit()
        gates = torch.ones(self._shape(), device=self.device, requires_grad=True)
        optimizer = torch.optim.Adam([gates], lr=options.rate)
        history: list[torch.Tensor] = []
        losses: list[float] = []
        for step in range(options.steps):
            distance = self._distance(step % POOL, gates) / unit
            torch.autograd.backward(distance + options.l1 * gates.abs().mean())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                gates.clamp_(0, 1)
            history.append(gates.detach().cpu().clone())
            losses.append(distance.item())
            if progress is not None and (step + 1) % options.window == 0:
                progress.step(
                    f"step {step + 1}: distance {losses[-1]:.4f}, {float(history[-1].mean()):.2f} of heads open"
                )
            if self._settled(history):
                break
        path = torch.stack(history)
        # Heads that were closed sooner have the smaller mean over all steps.
        return torch.lerp(path[-options.window :].mean(0), path.mean(0), TIE_BREAK).clamp(0, 1), losses

    @torch.no_grad()
    def recall(self, gates: torch.Tensor) -> dict[str, float]:
        """Share of the keys' tokens predicted, by kind of model; see `Gates.recall`."""
        order = gates.flatten().argsort()
        half = torch.ones(gates.numel())
        half[order[: gates.numel() // 2]] = 0
        kinds = {"full": None, "half": half.view_as(gates), "streaming": torch.zeros_like(gates)}
        right, total = dict.fromkeys(kinds, 0), 0
        head: torch.nn.Module = cast(Any, self.model).get_output_embeddings()
        for _ in range(TEST_BATCHES):
            ids, asked = self._batch()
            wanted = ids.roll(-1, 1)[asked]
            total += len(wanted)
            for name, values in kinds.items():
                states = self._states(ids, None if values is None else values.to(self.device))[asked]
                right[name] += int((head(states).argmax(-1) == wanted).sum())
        return {name: count / total for name, count in right.items()}

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids, asked = self.data.draw(self.options.batch, self.generator)
        return ids.to(self.device), asked.to(self.device)

    def _states(self, ids: torch.Tensor, gates: torch.Tensor | None) -> torch.Tensor:
        self.attention.gates = gates
        return hidden_states(self.model, ids)

    def _distance(self, index: int, gates: torch.Tensor) -> torch.Tensor:
        """Mean square of what the gates change, on one batch of the pool."""
        while index >= len(self._pool):
            ids, asked = self._batch()
            with torch.no_grad():
                self._pool.append((ids, asked, self._states(ids, None)[asked].float()))
        ids, asked, wanted = self._pool[index]
        return (self._states(ids, gates)[asked].float() - wanted).square().mean()

    @torch.no_grad()
    def _unit(self) -> float:
        """The distance of the all-streaming model."""
        closed = torch.zeros(self._shape(), device=self.device)
        return max(sum(self._distance(index, closed).item() for index in range(SCALE_BATCHES)) / SCALE_BATCHES, 1e-12)

    def _shape(self) -> tuple[int, int]:
        layers = Shape.of(self.model.config, self.model.dtype).layers
        heads = {layer.heads for layer in layers}
        if len(heads) > 1:
            raise RequestError(
                f"gates are trained for layers with equally many key heads; those of this model have {', '.join(map(str, sorted(heads)))}"
            )
        return len(layers), heads.pop()

    def _settled(self, history: list[torch.Tensor]) -> bool:
        window = self.options.window
        if len(history) < 2 * window:
            return False
        now, before = torch.stack(history[-window:]).mean(0), torch.stack(history[-2 * window : -window]).mean(0)
        return float((now - before).abs().max()) < self.options.settled
