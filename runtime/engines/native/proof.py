"""Proof of a program on a probe: some tokens through transformers' modules and through C, with one layer of each kind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.base import Chunk
from runtime.engines.native.pool import Pool
from runtime.engines.program.operations import Layer
from runtime.kernels.cpu.decoder import OPS

if TYPE_CHECKING:
    from runtime.engines.native.engine import LlamaEngine
    from runtime.engines.native.parts import Parts

TOKENS = 12  # the last three are read one by one
# The largest relative error that rounding explains: of modules that compute in a dtype, and of activations in one digit.
_ERRORS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_DIGIT_ERROR = 0.2


def disproof(engine: LlamaEngine) -> str | None:
    """How the engine and the modules that it took over differ in their logits; None: they agree."""
    parts, model = engine.parts, engine.module
    chosen = kinds(parts)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, min(parts.vocabulary, model.get_input_embeddings().num_embeddings), (TOKENS,), generator=generator
    )
    try:
        with torch.inference_mode(), _only(model, [parts.program.layers[i].name for i in chosen]):
            wanted = model(input_ids=ids[None], use_cache=False).logits[0].float()
    except Exception as error:  # whatever code of models raises
        return f"transformers' modules do not compute a probe: {error}"
    pool = Pool(parts, 1, [parts.blocks[i] for i in chosen])
    text, found = ids.tolist(), []
    for start, end in ((0, TOKENS - 3), (TOKENS - 3, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS)):
        ready = engine.prepare(pool.decoder, [Chunk(text[start:end], start, (0,))], range(end - start))
        engine.compute(ready.step)
        found.append(ready.logits)
    return _difference(torch.cat(found), wanted, parts)


def _difference(found: torch.Tensor, wanted: torch.Tensor, parts: Parts) -> str | None:
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return "its logits on a probe are finite elsewhere than those of transformers' modules"
    found, wanted = found.where(finite, 0.0), wanted.where(finite, 0.0)
    error = float((found - wanted).norm() / (wanted.norm() + 1e-30))
    most = max(_ERRORS[parts.cache_dtype], _DIGIT_ERROR if parts.decoder.digits == 1 and parts.digits else 0.0)
    if error <= most:
        return None
    return f"its logits on a probe differ by {error:.2g} from those of transformers' modules, and rounding explains {most:g}"


def kinds(parts: Parts) -> list[int]:
    """The first layer of each kind: of the same operations on weights of the same shapes and representations."""
    found: dict[Any, int] = {}
    for number, (layer, block) in enumerate(zip(parts.program.layers, parts.blocks, strict=True)):
        linears = [block.ops[i].linear for i in range(block.count) if OPS[block.ops[i].kind] == "linear"]
        shapes = tuple(
            (each.kind, each.scale_type, each.group, each.rows, each.columns, bool(each.zero)) for each in linears
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
        stack.callback(next(iter(chosen)).register_forward_hook(note).remove)
        for module in blocks:
            if module not in chosen:
                module.__dict__["forward"] = skip
                stack.callback(functools.partial(module.__dict__.pop, "forward"))
        yield
