"""Dry run of a model on shapes alone, which finds before anything is computed what would fail at the end.

The engines of the runtime run a copy of the model on torch's meta device. That shows whether it takes no KV cache, or only its own;
whether its blocks pass on more than hidden states; and whether the weight of a layer is read by others. No architecture is named here. A
model that asks for values, which shapes do not have, is taken to run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from compress.model.module_hooks import hooks
from compress.model.partial import StandIn
from compress.model.streamed import StreamedModel
from runtime.engines.torch.encoder import TorchEncoderEngine
from runtime.engines.torch.engine import TorchEngine
from runtime.engines.torch.seq2seq import TorchSeq2SeqEngine
from runtime.errors import RequestError, first_line
from runtime.modeling.experts import Experts, layout_of
from runtime.modeling.linear_modules import is_matrix, sides
from runtime.modeling.skeleton import find_stacks

TOKENS = 4
_META = torch.device("meta")
# What models raise of their own accord. What the meta device cannot do is a RuntimeError, speaks of meta, or comes out of a library of
# kernels (Triton's is a ValueError).
_OWN = (ValueError, TypeError, AttributeError, LookupError)


def check_runs(streamed: StreamedModel, compressed: Collection[str] = ()) -> None:
    """Raise `RequestError` where the runtime could not run the model, or its blocks cannot be run one by one.

    Args:
        streamed: whose weights need not be there.
        compressed: names of layers that will be.
    """
    name = type(streamed.model).__name__
    _check_weights_apart(streamed, name)
    if _runs_packed(streamed, compressed):
        return
    rehearsed, run, layers = _rehearsal(streamed, compressed)
    # The weights of layers that are not called are read by who has them (Mamba's dt_proj), and stay.
    called: set[str] = set()

    def note(own: str, *_: Any) -> None:
        called.add(own)

    watched = {layer: partial(note, own) for own, layer in layers.items()}
    try:
        with _handing_on(rehearsed, name), hooks(watched), torch.inference_mode(), _META:
            run()
    except RequestError:
        raise
    except _OWN as error:
        if "meta" in str(error) or not _raised_by_model(error, streamed.model):
            return
        raise RequestError(f"this runtime cannot run {name}: {first_line(error)}") from error
    except RuntimeError:  # NotImplementedError is one
        return
    read: list[str] = []  # layers whose weight was asked for
    _pack(rehearsed, {own: layers[own] for own in called}, read)
    try:
        with torch.inference_mode(), _META:
            run()
    except (*_OWN, RuntimeError) as error:
        where = f"of {read[-1]} " if read else ""
        text = (
            f"{name} itself reads the weight {where}as it runs, and a compressed layer has none ({first_line(error)})"
        )
        raise RequestError(f"{text}; ignore it in the recipe") from error


def _runs_packed(streamed: StreamedModel, compressed: Collection[str]) -> bool:
    """Whether the model runs with all layers packed, as most do at once: where it does not, it takes two more runs to say why."""
    rehearsed, run, layers = _rehearsal(streamed, compressed)
    _pack(rehearsed, layers, [])
    try:
        with _handing_on(rehearsed, type(streamed.model).__name__), torch.inference_mode(), _META:
            run()
    except (*_OWN, RuntimeError):
        return False
    return True


def _rehearsal(
    streamed: StreamedModel, compressed: Collection[str]
) -> tuple[Any, Callable[[], None], dict[str, nn.Module]]:
    """A copy of the model on meta, the function that runs it, and its layers that will be compressed, by their names."""
    rehearsed = _copy(streamed.model)
    # Experts that something stands in for are no modules of the copy.
    modules = dict(rehearsed.named_modules(remove_duplicate=False))
    layers = {own: modules[own] for own in compressed if own in modules and is_matrix(modules[own])}
    return rehearsed, _runner(streamed.kind, rehearsed), layers


def _pack(model: nn.Module, layers: Mapping[str, nn.Module], read: list[str]) -> None:
    for own, layer in layers.items():
        model.set_submodule(own, _Packed(own, layer, read))


def _check_weights_apart(streamed: StreamedModel, name: str) -> None:
    """Blocks that have weights in common are compressed one after the other, and the second would undo the first."""
    prefixes = [streamed.block_prefix(index) for index in range(len(streamed.blocks))]
    owner: dict[int, tuple[int, str]] = {}
    for index, block in enumerate(streamed.blocks):
        for own, parameter in block.named_parameters(remove_duplicate=False):
            first, held = owner.setdefault(id(parameter), (index, own))
            if first != index:
                raise _shared(name, prefixes[first] + held, prefixes[index] + own)
    for one, other in streamed.ties.items():
        homes = [next((p for p in prefixes if own.startswith(p)), None) for own in (one, other)]
        if None not in homes and homes[0] != homes[1]:
            raise _shared(name, other, one)


def _shared(name: str, one: str, other: str) -> RequestError:
    return RequestError(
        f"the layers of {name} share weights ({other} is {one}): layers that share their weights cannot be compressed block by block"
    )


class _Stub(StandIn):
    """Stand-in for experts, which ask for values (the routing): returns an output of the input's shape."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.empty_like(hidden_states)


def _copy(model: nn.Module) -> Any:
    """The model on meta, buffers too; models change themselves as they run (BigBird swaps modules), so it is not run itself."""
    stubs = {
        id(module): _Stub(module)
        for module in model.modules()
        if isinstance(module, Experts) or layout_of(module) is not None
    }
    return copy.deepcopy(model, dict(stubs)).to(_META)


def _runner(kind: str, model: Any) -> Callable[[], None]:
    """A function that runs a model as the runtime does: a prompt, then one more token; an encoder once."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=_META)

    def decoder() -> None:
        engine = TorchEngine(model, _META)
        cache = engine.new_cache()
        engine.forward(ids, cache, None, None)
        engine.forward(ids[:, :1], cache, None, None)

    def encoder_decoder() -> None:
        engine = TorchSeq2SeqEngine(model, _META)
        if engine.features:
            return  # how long the features of a sound are, only the family's extractor knows
        states = engine.encode(ids, None)
        cache = engine.new_cache()
        engine.decode(ids, states, None, cache)
        engine.decode(ids[:, :1], states, None, cache)

    def encoder() -> None:
        TorchEncoderEngine(model, _META).forward(ids, None)

    return {"decoder": decoder, "encoder-decoder": encoder_decoder}.get(kind, encoder)


@contextmanager
def _handing_on(model: Any, name: str) -> Iterator[None]:
    """RequestError inside where a block changes what the block before handed it beside the hidden states.

    T5 hands on the bias that its first block has computed, the same to all: that is known once. PEGASUS-X has global tokens, which every
    block changes: what enters a block is then more than the state that goes from block to block here.
    """

    def hook(handed: list[Any], block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """`handed`: what the last block of the stack returned beside its hidden states."""
        extras = list(output[1:]) if isinstance(output, (tuple, list)) else []
        given = {id(value) for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.Tensor)}
        for before, after in zip(handed, extras, strict=False):
            if id(before) in given and after is not before:
                raise RequestError(
                    f"the blocks of {name} ({type(block).__name__}) hand on more than their hidden states, and each changes it: they "
                    "cannot be compressed block by block"
                )
        handed[:] = extras

    watched: dict[nn.Module, Callable[..., None]] = {}
    for _, blocks in find_stacks(model):
        watched |= dict.fromkeys(blocks, partial(hook, []))
    with hooks(watched, keywords=True):
        yield


@dataclass(frozen=True)
class NoWeight:
    """In the place of a weight that will be packed: models look at the dtype of one before they compute (T5, DeepSeek-V3.2)."""

    dtype: torch.dtype
    device: torch.device


class _Packed(nn.Module):
    """Stand-in for a layer that will be compressed and so has no weight that others could read; `read` lists the weights asked for."""

    def __init__(self, name: str, layer: Any, read: list[str]) -> None:
        super().__init__()
        self.out_features, self.in_features = sides(layer) or (0, 0)
        self.bias = layer.bias
        self.__dict__["_asked"] = name, NoWeight(layer.weight.dtype, _META), read

    @property
    def weight(self) -> NoWeight:
        """Of which nothing but dtype and device may be asked: everything else would dequantize it at every call."""
        name, instead, read = self.__dict__["_asked"]
        read.append(name)
        return instead  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], self.out_features)


def _raised_by_model(error: BaseException, model: nn.Module) -> bool:
    """Whether an error comes out of the model's own code, or transformers'."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    place = str(frame.f_globals.get("__name__", ""))
    return place.partition(".")[0] in ("transformers", type(model).__module__.partition(".")[0])
