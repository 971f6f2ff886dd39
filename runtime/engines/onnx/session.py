"""Session of ONNX Runtime that reads and writes torch tensors where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch

from runtime.checkpoint.export_directory import Export
from runtime.errors import ArtifactError, RequestError, first_line
from runtime.system.distribution import how_to_install

DTYPES = {"float32": torch.float32, "float16": torch.float16}
_KINDS = {torch.int64: numpy.int64, torch.float32: numpy.float32, torch.float16: numpy.float16}
Bound = torch.Tensor | tuple[torch.Tensor, Sequence[int]]  # a tensor, or one of which only a part is shown


class Session:
    """A graph.

    Args:
        file: the `.onnx` file. Beside one of ONNX Runtime's own operators lies another for "fast", which is taken then.
        device: the CPU, or a GPU that ONNX Runtime has a provider for.
        kernels: "auto" sums products with compressed weights in float32; "fast" rounds activations to int8 first; "reference" leaves
            the graph as it is written.
        threads: of ONNX Runtime; None: as many as torch has.
        entries: settings of the session that the export asks for.

    Raises:
        RequestError: ONNX Runtime or its provider for the device is not installed, or `kernels` is none of these.
        ArtifactError: the graph cannot be opened.
    """

    def __init__(
        self, file: Path, device: torch.device, kernels: str, threads: int | None, entries: Mapping[str, str]
    ) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            how = how_to_install("onnx")
            raise RequestError(f"an ONNX export needs onnxruntime, which is not installed: {how}") from error
        if kernels not in ("auto", "fast", "reference"):
            raise RequestError(f"kernels {kernels!r} is unknown to ONNX Runtime: auto, fast or reference")
        provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}.get(device.type)
        available = onnxruntime.get_available_providers()
        if provider not in available:
            raise RequestError(f"device {device}: this onnxruntime has only {', '.join(available)}; try 'cpu'")
        version, options = f"ONNX Runtime {onnxruntime.__version__}", onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3
        # What int4 products round activations to: 1 float32, 4 int8 (what ONNX Runtime does when it is not told).
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4" if kernels == "fast" else "1")
        for name, value in entries.items():
            options.add_session_config_entry(name, value)
        if kernels == "reference":
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        fast = file.with_name(f"{file.stem}_fast.onnx")
        if kernels == "fast" and fast.is_file():
            file = fast
        chosen: Any = provider if device.type == "cpu" else (provider, {"device_id": device.index or 0})
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=[chosen])
        except Exception as error:  # onnxruntime raises types of its own, one for each kind of trouble
            raise ArtifactError(f"{file} cannot be opened by {version}: {first_line(error)}") from error
        if self._session.get_providers()[0] != provider:
            raise RequestError(f"device {device}: ONNX Runtime does not find the libraries of {provider}; try 'cpu'")
        self.device = device
        self.inputs = frozenset(value.name for value in self._session.get_inputs())
        rounding = {"fast": "int8 activations where weights are integers", "auto": "float32 sums"}
        how = rounding.get(kernels, "not optimized")
        self.description = f"{version} ({provider}, {how})"
        # An empty tensor has no address, and ONNX Runtime wants one.
        self._somewhere = torch.zeros(16, device=device)
        self._binding: Any = self._session.io_binding()
        self._bound: dict[tuple[str, str], tuple[Any, ...]] = {}

    def run(self, inputs: Mapping[str, Bound], outputs: Mapping[str, Bound]) -> None:
        """Fill `outputs` (contiguous, of the right shape) from `inputs`; those that the graph does not have are left out."""
        held = []  # the binding keeps no reference to what it reads
        places: dict[tuple[str, str], tuple[Any, ...]] = {}
        for name, value in inputs.items():
            if name in self.inputs:
                tensor, shape = value if isinstance(value, tuple) else (value.contiguous(), value.shape)
                held.append(tensor)
                places["input", name] = self._place(tensor, shape)
        for name, value in outputs.items():
            tensor, shape = value if isinstance(value, tuple) else (value, value.shape)
            places["output", name] = self._place(tensor, shape)
        self._bind(places)
        if self.device.type == "cuda":  # what torch has queued is not ordered with what ONNX Runtime starts
            torch.cuda.synchronize(self.device)
        self._session.run_with_iobinding(self._binding)

    def _place(self, tensor: torch.Tensor, shape: Sequence[int]) -> tuple[Any, ...]:
        return _KINDS[tensor.dtype], tuple(shape), tensor.data_ptr() or self._somewhere.data_ptr()

    def _bind(self, places: dict[tuple[str, str], tuple[Any, ...]]) -> None:
        """Tell ONNX Runtime where things lie. Only what moved since the last call: a cache in place is bound once, which is a third
        of the time of a small model's step."""
        if places.keys() != self._bound.keys():  # what is not bound anew would be written where it was
            self._binding, self._bound = self._session.io_binding(), {}
        known, self._bound = self._bound, {}  # nothing is known when a binding fails half way
        device, index = self.device.type, self.device.index or 0
        for (side, name), place in places.items():
            if known.get((side, name)) != place:
                kind, shape, address = place
                bind = self._binding.bind_input if side == "input" else self._binding.bind_output
                bind(name, device, index, kind, shape, address)
        self._bound = places


class OnnxGraphs:
    """Base of the engines of ONNX exports: a session for each graph, and empty tensors of their caches.

    Args:
        export: the directory.
        device: CPU, or a GPU that ONNX Runtime has a provider for.
        kernels: "auto" and "reference" sum products with weights in float32; "fast" rounds activations to int8.
        threads: of ONNX Runtime; None: as many as torch has.
    """

    graphs: ClassVar[tuple[str, ...]] = ("model",)

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        facts = export.facts
        self.device = device
        self.vocab_size = int(facts["vocab_size"])
        limit = facts.get("context_length")
        self.context_length: int | None = None if limit is None else int(limit)
        self.weight_bytes = sum(file.stat().st_size for file in export.path.glob("*.onnx*"))
        self._dtype = DTYPES[facts["dtype"]]
        entries = facts.get("session", {})
        if not isinstance(entries, Mapping) or not all(isinstance(value, str) for value in entries.values()):
            raise ArtifactError("export.json: session must hold strings")
        files = [export.path / f"{name}.onnx" for name in self.graphs]
        self.sessions = [Session(file, device, kernels, threads, entries) for file in files]
        self.description = self.sessions[-1].description

    def explain(self) -> dict[str, str]:
        """{graph: what computes it}; ONNX Runtime does not tell more."""
        return {f"{name}.onnx": self.description for name in self.graphs}

    def empty(self, *shape: int) -> torch.Tensor:
        """A tensor for what a graph writes."""
        return torch.empty(*shape, dtype=self._dtype, device=self.device)

    def empty_cache(self, shapes: Sequence[Sequence[int]], batch: int, length: int) -> list[torch.Tensor]:
        """Keys and values of each layer, `[batch, heads, length, size]`; `shapes` has heads and size of the layers."""
        return [self.empty(batch, int(heads), length, int(size)) for heads, size in shapes for _ in range(2)]


def cache_names(prefix: str, layers: int) -> list[str]:
    """What the graphs call keys and values: `past_key_values.0.key`, `past_key_values.0.value`, ..."""
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
