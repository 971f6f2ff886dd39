"""Trace of a decoder's forward pass in which every module with weights gives random numbers: who computes what of whose numbers.

Random numbers tell tensors apart: what a module reads is found among what others gave. Nothing of the weights is needed, and next to no
time. Two rows of tokens are read: one begins at position 0, one ends at the last that the model was made for, where scales that depend on
positions are seen; numbers of the last tokens are large, so that bounds are seen.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from runtime.engines.program.leaves import kind_of, shape_of
from runtime.engines.program.mixtures import find_mixtures, outputs_of, twin_of
from runtime.engines.program.operations import UnknownError
from runtime.engines.program.tables import cosines_and_sines
from runtime.modeling.skeleton import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "compress_trace"
TOKENS = 3
FAR = 4096  # where a model does not say how many positions it has
SIZES = torch.tensor([[1.0, 1.0, 1.0], [1.0, 3.0, 40.0]])[..., None]  # of the numbers of each token


@dataclass
class Event:
    """A module was called (`name`, `module`), or attention was computed; tensors as they were then.

    Attributes:
        kind: "linear", "norm", "embedding", "router", "experts", "rotary", "attention", "enter" and "leave" of a block.
        inputs: what it read: of attention queries, keys and values `[batch, heads, tokens, head_dim]`, of experts also those of each
            token and their weights.
        output: what it gave: of attention `[batch, tokens, heads * value_dim]`; of rotary modules cosines and sines, whose input are
            positions `[batch, tokens]`.
    """

    kind: str
    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    output: tuple[torch.Tensor, ...]
    more: dict[str, Any] = field(default_factory=dict)


class Mask:
    """In place of an attention mask: the function that says what it hides."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def sees(self, query: int, key: int) -> bool:
        """Whether a query at one position sees the key at another."""
        zero = torch.tensor(0)
        return bool(self.function(zero, zero, torch.tensor(query), torch.tensor(key)))

    def window(self, where: str) -> int:
        """Positions that a query sees; 0: all before it. UnknownError: something else."""
        at = 1 << 20
        low, high = 0, at  # the first that is seen is in [low, high]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.sees(at, middle) else (middle + 1, high)
        window = at - low + 1 if low else 0
        for query in (0, 1, window, window + 1, 5000):
            for key in {0, query - window, query - window + 1, query // 2, query, query + 1, query + 100}:
                wanted = key <= query and (not window or key > query - window)
                if key >= 0 and self.sees(query, key) != wanted:
                    raise UnknownError(f"{where} hides other positions than later ones and those beyond a window")
        return window


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_, mask_function, **__: Mask(mask_function))


class _Running(threading.local):
    trace: Trace | None = None  # of this thread: the interface of attention has no other way to it


_running = _Running()


def _attention(
    module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    assert _running.trace is not None
    return _running.trace.attention(module, query, key, value, {**more, "mask": mask}), None


class Trace(TorchFunctionMode):
    """Events of one forward pass, in order. `logits`: what the model gave, `[2, TOKENS, vocabulary]`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.names = {module: name for name, module in model.named_modules()}
        self.blocks = find_blocks(model)
        self.logits = torch.empty(0)
        self._generator = torch.Generator().manual_seed(0)
        self._tables: dict[int, str] = {}
        self._model = model

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self._generator)

    def record(
        self, kind: str, module: nn.Module, inputs: tuple[Any, ...], output: tuple[Any, ...], **more: Any
    ) -> None:
        """Remember what is there now: models go on in place."""
        kept = [tuple(each.detach().clone() for each in side) for side in (inputs, output)]
        self.events.append(Event(kind, self.names.get(module, ""), module, kept[0], kept[1], more))

    # ---------------------------------------------------------------- in the place of modules
    def _linear(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = shape_of(self.names[module], module)
        y = self._of_sizes(*x.shape[:-1], outputs)
        self.record("linear", module, (x,), (y,))
        return y

    def _of_sizes(self, *shape: int) -> torch.Tensor:
        y = self.random(*shape)
        return (
            y * SIZES if y.dim() == 3 else (y.view(*SIZES.shape[:2], -1) * SIZES).view(y.shape) if y.dim() == 2 else y
        )

    def _router(self, module: nn.Module, x: torch.Tensor) -> Any:
        found = twin_of(module)(x)
        self.record("router", module, (x,), outputs_of(found, self.names[module]))
        return found

    def _experts(self, module: nn.Module, x: torch.Tensor, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        y = self._of_sizes(*x.shape)
        self.record("experts", module, (x, *given, *named.values()), (y,))
        return y

    def _norm(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = self.random(*x.shape)
        self.record("norm", module, (x,), (y,))
        return y

    def _lookup(self, module: nn.Module, ids: torch.Tensor, width: int) -> torch.Tensor:
        kinds, places = ids.unique(return_inverse=True)
        y = self.random(len(kinds), width)[places]
        self.record("embedding", module, (ids,), (y,))
        return y

    def attention(self, module: nn.Module, query: Any, key: Any, value: Any, more: dict[str, Any]) -> torch.Tensor:
        """In its place, `[batch, tokens, heads, value_dim]` for queries, keys and values `[batch, heads, tokens, head_dim]`."""
        y = self.random(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        self.record("attention", module, (query, key, value), (y.flatten(2),), **more)
        return y

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.embedding, torch.embedding):
            ids, weight = args[:2] if func is functional.embedding else args[1::-1]
            name = self._tables.get(id(weight))
            if name is not None:
                return self._lookup(self._model.get_submodule(name), ids, weight.shape[1])
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "mask", "dropout", "causal")
            given = dict(zip(names, args, strict=False))
            mask, causal = (
                given.get("mask", kwargs.get("attn_mask")),
                given.get("causal", kwargs.get("is_causal", False)),
            )
            more = {"scaling": kwargs.get("scale"), "tensor": mask, "causal": causal}
            module = next(each for each in reversed(self._calling) if "ttention" in type(each).__name__)
            return self.attention(module, args[0], args[1], args[2], more).transpose(1, 2)
        return func(*args, **kwargs)

    # ---------------------------------------------------------------- the pass
    def run(self, implementation: str) -> None:
        """One forward pass with attention computed so. Exceptions of the model's code come through."""
        _register()
        config: Any = self._model.config
        far = max(int(getattr(config, "max_position_embeddings", None) or FAR), 2 * TOKENS)
        embedding: Any = self._model.get_input_embeddings()
        ids = torch.tensor([[3, 5, 6], [7, 8, 9]]) % max(1, int(embedding.num_embeddings))
        places = torch.tensor([[0, 1, 2], [far - 3, far - 2, far - 1]])
        configs = {id(each): each for each in (config, *(getattr(m, "config", config) for m in self.names))}.values()
        before = [each._attn_implementation for each in configs]
        training = [each for each in self.names if each.training]
        _running.trace = self
        try:
            for module in training:
                module.training = False  # no dropout
            for each in configs:
                each._attn_implementation_internal = implementation
            with torch.no_grad(), self._stubs(), self:
                arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
                if "position_ids" in inspect.signature(self._model.forward).parameters:
                    arguments["position_ids"] = places
                self.logits = self._model(**arguments).logits.detach()
        finally:
            _running.trace = None
            for module in training:
                module.training = True
            for each, old in zip(configs, before, strict=True):
                each._attn_implementation_internal = old

    @contextmanager
    def _stubs(self) -> Iterator[None]:
        self._calling: list[nn.Module] = []
        blocks = set(self.blocks[1])
        with ExitStack() as stack:

            def put(module: nn.Module, forward: Callable[..., Any]) -> None:
                had = module.__dict__.get("forward")
                module.__dict__["forward"] = forward
                stack.callback(functools.partial(_restore, module, had))

            leaves: list[str] = []
            mixtures = find_mixtures(self._model)
            kinds = dict.fromkeys(mixtures, "experts") | dict.fromkeys(mixtures.values(), "router")
            for router in mixtures.values():
                twin_of(self._model.get_submodule(router))  # made while it has its own forward pass
            for name, module in self._model.named_modules(remove_duplicate=False):
                if any(name.startswith(f"{leaf}.") for leaf in leaves[-1:]):
                    continue
                kind = kinds.get(name) or kind_of(module)
                if kind is not None:
                    leaves.append(name)
                if module._forward_hooks or module._forward_pre_hooks:
                    raise UnknownError(f"{name or 'the model'} has hooks, which may compute anything")
                if kind == "linear":
                    put(module, functools.partial(self._linear, module))
                elif kind == "router":
                    put(module, functools.partial(self._router, module))
                elif kind == "experts":
                    put(module, functools.partial(self._experts, module))
                elif kind == "norm":
                    put(module, functools.partial(self._norm, module))
                elif kind == "embedding" and isinstance(module, nn.Embedding):
                    self._tables[id(module.weight)] = name
                elif kind == "embedding":
                    put(module, functools.partial(self._compressed, module))
                elif list(module.parameters(recurse=False)) and not _only_sinks(module):
                    raise UnknownError(
                        f"{name} is a {type(module).__name__}, which is no linear layer, norm or embedding"
                    )
                elif any("inv_freq" in each for each, _ in module.named_buffers(recurse=False)):
                    put(module, functools.partial(self._rotary, module, module.forward))
                elif module in blocks:
                    put(module, functools.partial(self._block, module, module.forward))
                elif name:
                    put(module, functools.partial(self._called, module, module.forward))
            yield

    def _compressed(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        return self._lookup(module, ids, int(module.shape[1]))

    def _rotary(self, module: nn.Module, forward: Any, *given: Any, **named: Any) -> Any:
        found = forward(*given, **named)
        both = cosines_and_sines(found)
        if both is None:
            raise UnknownError(f"{self.names[module]}, a {type(module).__name__}, gives no cosines and sines")
        extra = [*given[2:], *(value for name, value in named.items() if name not in ("x", "position_ids"))]
        positions = given[1] if len(given) > 1 else named["position_ids"]
        while positions.dim() > 2:  # of text, images and time, which are the same in a text
            positions = positions[0]
        self.record("rotary", module, (positions,), both, arguments=tuple(extra))
        return found

    def _block(self, module: nn.Module, forward: Any, *given: Any, **named: Any) -> Any:
        hidden = given[0] if given else named["hidden_states"]
        self.record("enter", module, (hidden,), ())
        self._calling.append(module)
        found = forward(*given, **named)
        self._calling.pop()
        self.record("leave", module, (), (found[0] if isinstance(found, tuple) else found,))
        return found

    def _called(self, module: nn.Module, forward: Any, *given: Any, **named: Any) -> Any:
        self._calling.append(module)
        found = forward(*given, **named)
        self._calling.pop()
        return found


def _only_sinks(module: nn.Module) -> bool:
    return {name for name, _ in module.named_parameters(recurse=False)} <= {"sinks"}


def _restore(module: nn.Module, had: Any) -> None:
    if had is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = had


def trace(model: PreTrainedModel) -> Trace:
    """The trace of a model, on whatever device its weights are.

    Raises:
        UnknownError: it cannot be traced.
    """
    problems: list[Exception] = []
    for implementation in (NAME, "sdpa"):  # Falcon computes attention itself, or calls torch
        found = Trace(model)
        try:
            found.run(implementation)
        except UnknownError:
            raise
        except Exception as error:  # the model's own code, with numbers that it has never seen
            problems.append(error)
            continue
        if sum(event.kind == "attention" for event in found.events) == len(found.blocks[1]):
            return found
    said = f": {problems[0]}" if problems else ""
    raise UnknownError(f"its attention is not computed once a layer by a function that can be replaced{said}")
