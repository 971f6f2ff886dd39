"""A stand-in for CUDA graphs on the CPU, which fails where a real one would fail, or would silently replay something else.

A graph repeats what was launched while it was captured: with the same addresses, shapes and numbers, and without the host. So while a
computation is captured or replayed, every operation of torch and every launch of a kernel is written down: what reads a value back,
makes a shape from one, brings data from the host or draws a random number fails at once, and a replay must be the captured one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from runtime.engines.cuda.steps import Computation
from runtime.kernels.triton import jit

#: Methods that give a tensor's values to the host; of tensors on a CPU they reach no operation.
TO_THE_HOST = {getattr(torch.Tensor, name) for name in ("cpu", "numpy", "tolist", "__array__", "pin_memory")}
#: Without a device they make tensors of the host.
FACTORIES = {
    getattr(torch, name) for name in ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
}
REFUSED = {
    torch.Tag.data_dependent_output: "reads a value back",
    torch.Tag.dynamic_output_shape: "makes a shape from values",
    torch.Tag.nondeterministic_seeded: "draws random numbers, which differ at every replay",
}


class Calls(TorchFunctionMode):
    """Fails at `TO_THE_HOST`, and at `FACTORIES` without a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in TO_THE_HOST, f"{func.__name__} gives values to the host"
        assert func not in FACTORIES or kwargs.get("device") is not None, f"{func.__name__} makes a tensor on the host"
        return func(*args, **kwargs)


class Trace(TorchDispatchMode):
    """What one run of a computation does.

    Attributes:
        steps: operations and launches: their names, and of each argument the number, or shape, strides, dtype and, unless the run has made
            it, the address. given: those addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self.given: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            found = func.decompose(*args, **kwargs)  # in inference mode composite operations come as they are
        if found is not NotImplemented:
            return found
        self._check(func, args)
        flat = tree_flatten((args, kwargs))[0]
        self.note(str(func), flat)
        before = {storage(each) for each in flat if isinstance(each, torch.Tensor)}
        found = func(*args, **kwargs)
        self._made |= {storage(each) for each in tree_flatten(found)[0] if isinstance(each, torch.Tensor)} - before
        return found

    @staticmethod
    def _check(func: Any, args: Sequence[Any]) -> None:
        aten = torch.ops.aten
        indexing = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        places = [each for each in args[1] if each is not None] if indexing else []
        assert not any(each.dtype in (torch.bool, torch.uint8) for each in places), f"{func} makes a shape from values"
        for tag, reason in REFUSED.items():
            assert tag not in func.tags or indexing, f"{func} {reason}"
        assert func.overloadpacket is not aten.lift_fresh, "a tensor is made of numbers, which the host would send"

    def note(self, name: str, arguments: Sequence[Any]) -> None:
        """Write down an operation or a launch."""
        self.steps.append((name, *map(self._describe, arguments)))

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.ScriptObject):  # a process group, or what is done with it
            return str(value._type())
        if not isinstance(value, torch.Tensor):
            return value
        address = 0
        if storage(value) not in self._made:
            address = value.data_ptr()
            self.given.add(storage(value))
        return tuple(value.shape), value.stride(), value.dtype, address


def storage(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


class Fake:
    """Captures like CUDA: the computation runs twice to warm up, once to be captured, and is replayed without anything new.

    Args:
        every: of a graph's replays the first three, and then one in so many, are compared with its capture; the others just run.

    Attributes:
        traces: of each capture.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.captures: list[int] = []
        self.replays: list[int] = []
        self.outputs: list[torch.Tensor] = []
        self.traces: list[Trace] = []
        self._tracing: Trace | None = None

    def __call__(self, compute: Computation) -> Computation:
        for _ in range(2):
            compute()
        number = len(self.captures)
        self.captures.append(number)
        found, captured = self._run(compute)
        self.traces.append(captured)
        logits, states = (torch.full_like(each, float("nan")) for each in found)  # every replay writes here
        self.outputs += [logits, states]

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            self.replays.append(number)
            count = self.replays.count(number)
            for output in self.outputs:  # graphs share their memory
                output.fill_(float("nan"))
            if count <= 3 or count % self.every == 0:
                found, trace = self._run(compute)
                assert len(trace.steps) == len(captured.steps), "a replay is another computation"
                for old, new in zip(captured.steps, trace.steps, strict=True):
                    assert old == new, f"a graph would replay {old}, not {new}"
            else:
                found = compute()
            for static, value in zip((logits, states), found, strict=True):
                static.copy_(value)
            return logits, states

        return replay

    def _run(self, compute: Computation) -> tuple[tuple[torch.Tensor, torch.Tensor], Trace]:
        trace = self._tracing = Trace()
        try:
            with Calls(), trace:
                return compute(), trace
        finally:
            self._tracing = None

    def launch(self, kernel: jit.Entry, grid: Sequence[int], arguments: dict[str, Any]) -> bool:
        """A `jit.Entry.launcher` that computes nothing: results are zeros."""
        if self._tracing is not None:
            self._tracing.note(kernel.name, [*grid, *arguments.values()])
        for name in ("out", "total"):
            if name in arguments and arguments[name] is not arguments.get("x"):
                arguments[name].zero_()
        return True
