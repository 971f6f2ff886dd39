"""From transformers' modules to the native engine: the program is read off them, and proven on a probe.

The probe is a few tokens, which one layer of each kind computes in C and in the modules. Activation
quantization is off in both: a value at a rounding boundary may get either code, and that noise would hide errors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.parts import Parts, linears, read_parts
from runtime.engines.native.pool import Pool
from runtime.engines.program.operations import Layer
from runtime.layers.unrounded import unrounded

if TYPE_CHECKING:
    from runtime.engines.torch.engine import TorchEngine
    from runtime.kv_cache.policy.policy import Policy

PROBE = 12  # tokens; the last three are read one by one
# The largest relative error that rounding explains: of modules that compute in a dtype, and of activations in one digit.
_ERRORS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_DIGIT_ERROR = 0.2
_log = logging.getLogger("compress.engine")


def take_over(engine: TorchEngine, policy: Policy | None = None) -> NativeEngine | None:
    """The native engine for this model and its cache, or None where it does not fit; the log and the engine's `explain` say why."""
    found = read_engine(engine, policy)
    if isinstance(found, NativeEngine):
        return found
    leave(engine, found)
    return None


def read_engine(engine: TorchEngine, policy: Policy | None = None) -> NativeEngine | str:
    """The native engine, if it knows the model, holds its cache so and computes a probe as the modules do; otherwise the reason."""
    parts = read_parts(engine.module, engine.device)
    if isinstance(parts, str):
        return parts
    found = NativeEngine(engine, parts)
    reason = None if policy is None else found.hold(policy)
    return reason or disproof(found) or found


def leave(engine: TorchEngine, reason: str) -> None:
    """Say why transformers' modules compute a model."""
    _log.info("transformers computes this model, not the decoder in C: %s", reason)
    engine.why_modules = f"not the decoder in C: {reason}"


# ---------------------------------------------------------------- proof on a probe
def disproof(engine: NativeEngine) -> str | None:
    """How the engine and the modules that it took over differ in their logits; None: they agree."""
    parts, model = engine.parts, engine.module
    names = [parts.program.layers[i].name for i in kinds(parts)]
    try:
        with torch.inference_mode(), _only(model, names), unrounded(model):
            wanted = model(input_ids=torch.tensor([_probe_ids(engine)]), use_cache=False).logits[0].float()
    except Exception as error:  # whatever code of models raises
        return f"transformers' modules do not compute a probe: {error}"
    with parts.unrounded():
        return _difference(probe(engine), wanted, parts)


def _probe_ids(engine: NativeEngine) -> list[int]:
    most = min(engine.parts.vocabulary, engine.vocab_size)
    return torch.randint(0, most, (PROBE,), generator=torch.Generator().manual_seed(0)).tolist()


def probe(engine: NativeEngine) -> torch.Tensor:
    """Logits of the probe by one layer of each kind, float32 `[PROBE, vocab]`."""
    parts, text, found = engine.parts, _probe_ids(engine), []
    pool = Pool(parts, 1, [parts.blocks[i] for i in kinds(parts)])
    for start, end in ((0, PROBE - 3), (PROBE - 3, PROBE - 2), (PROBE - 2, PROBE - 1), (PROBE - 1, PROBE)):
        ready = engine.prepare(pool.decoder, [Chunk(text[start:end], start, (0,))], range(end - start))
        engine.compute(ready.step)
        found.append(ready.logits)
    return torch.cat(found)


def _difference(found: torch.Tensor, wanted: torch.Tensor, parts: Parts) -> str | None:
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return "its logits on a probe are finite elsewhere than those of transformers' modules"
    found, wanted = found.where(finite, 0.0), wanted.where(finite, 0.0)
    error = float((found - wanted).norm() / (wanted.norm() + 1e-30))
    most = max(_ERRORS[parts.cache_dtype], _DIGIT_ERROR if 1 in parts.digits else 0.0)
    if error <= most:
        return None
    return f"its logits on a probe differ by {error:.2g} from those of transformers' modules, and rounding explains {most:g}"


def kinds(parts: Parts) -> list[int]:
    """The first layer of each kind: of the same operations on weights of the same shapes and representations, experts' too."""
    found: dict[Any, int] = {}
    for number, (layer, block) in enumerate(zip(parts.program.layers, parts.blocks, strict=True)):
        shapes = tuple(
            (
                each.kind,
                each.weight_type,
                each.scale_type,
                each.code_bits,
                each.group,
                each.rows,
                each.columns,
                bool(each.zero),
            )
            for _, each, _ in linears(block.ops, block.count)
        )
        found.setdefault((_nameless(layer), shapes), number)
    return list(found.values())


def _nameless(layer: Layer) -> tuple[Any, ...]:
    """Its operations, modules by their names within it."""
    prefix = f"{layer.name}."

    def local(value: Any) -> Any:
        if isinstance(value, str):
            return value.removeprefix(prefix)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{each.name: local(getattr(value, each.name)) for each in fields(value)})
        return value

    return tuple(local(operation) for operation in layer.operations)


@contextmanager
def _only(model: nn.Module, names: list[str]) -> Iterator[None]:
    """The model with no other layers than these: the others pass on what they read."""
    blocks: Any = model.get_submodule(names[0].rpartition(".")[0])
    chosen = {model.get_submodule(name) for name in names}
    tuples = False

    def note(module: Any, given: Any, result: Any) -> None:
        nonlocal tuples
        tuples = isinstance(result, tuple)

    def skip(hidden: torch.Tensor | None = None, *_: Any, hidden_states: torch.Tensor | None = None, **__: Any) -> Any:
        passed = hidden if hidden is not None else hidden_states
        return (passed,) if tuples else passed

    with ExitStack() as stack:
        stack.callback(blocks[0].register_forward_hook(note).remove)  # the first of its kind, so it is never skipped
        for module in blocks:
            if module not in chosen:
                module.__dict__["forward"] = skip
                stack.callback(functools.partial(module.__dict__.pop, "forward"))
        yield


__all__ = ["disproof", "kinds", "leave", "probe", "read_engine", "take_over"]
