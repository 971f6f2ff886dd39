"""Engines of decoders and encoders exported to ONNX; keys and values lie in torch tensors that ONNX Runtime reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch

from runtime.checkpoint.export_directory import Export
from runtime.engines import past_present
from runtime.engines.base import EngineOptions
from runtime.engines.past_present import PastPresentEngine, named
from runtime.errors import ArtifactError, RequestError, first_line
from runtime.system.distribution import how_to_install

DTYPES = {"float32": torch.float32, "float16": torch.float16}
_KINDS = {torch.int64: numpy.int64, torch.float32: numpy.float32, torch.float16: numpy.float16}


class Session:
    """A graph in ONNX Runtime, which reads and writes torch tensors where they lie.

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

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Fill `outputs` (contiguous, of the right shape) from `inputs`; those that the graph does not have are left out."""
        # held until it has run: the binding keeps no reference to what it reads
        held = {("input", name): value.contiguous() for name, value in inputs.items() if name in self.inputs}
        held |= {("output", name): value for name, value in outputs.items()}
        empty = self._somewhere.data_ptr()
        self._bind({key: (_KINDS[t.dtype], tuple(t.shape), t.data_ptr() or empty) for key, t in held.items()})
        if self.device.type == "cuda":  # what torch has queued is not ordered with what ONNX Runtime starts
            torch.cuda.synchronize(self.device)
        self._session.run_with_iobinding(self._binding)

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
        self.dtype = DTYPES[facts["dtype"]]
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
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def empty_cache(self, shapes: Sequence[Sequence[int]], batch: int, length: int) -> list[torch.Tensor]:
        """Keys and values of each layer, `[batch, heads, length, size]`; `shapes` has heads and size of the layers."""
        return [self.empty(batch, int(heads), length, int(size)) for heads, size in shapes for _ in range(2)]


@dataclass
class OnnxSeq2SeqCache:
    """Keys and values of the output so far and of the source, two tensors `[batch, heads, length, size]` a layer."""

    own: list[torch.Tensor] = field(default_factory=list)
    cross: list[torch.Tensor] = field(default_factory=list)


class OnnxSeq2SeqEngine(OnnxGraphs):
    """Runs `encoder.onnx` and `cross.onnx` once for a source and `decoder.onnx` for every token."""

    graphs = ("encoder", "cross", "decoder")

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        super().__init__(export, device, kernels, threads)
        self.features, self.decoder_context_length = False, self.context_length
        self._facts = export.facts
        self._encoder, self._keys, self._decoder = self.sessions

    @torch.inference_mode()
    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encoder states `[batch, length, hidden]`; without a mask every token counts."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.int64)
        states = self.empty(*input_ids.shape, int(self._facts["hidden_size"]))
        self._encoder.run({"input_ids": input_ids, "attention_mask": mask}, {"last_hidden_state": states})
        return states

    def new_cache(self) -> OnnxSeq2SeqCache:
        """An empty decoder cache."""
        return OnnxSeq2SeqCache()

    @torch.inference_mode()
    def decode(
        self,
        decoder_input_ids: torch.Tensor,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: OnnxSeq2SeqCache | None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Decoder logits for the new tokens, or after the last of them only; the cache is extended."""
        cache = OnnxSeq2SeqCache() if cache is None else cache
        batch, count = decoder_input_ids.shape
        if not cache.cross:
            cache.cross = self.empty_cache(self._facts["cross"], batch, states.shape[1])
            self._keys.run({"encoder_hidden_states": states}, named("cross", cache.cross))
            cache.own = self.empty_cache(self._facts["cache"], batch, 0)
        if attention_mask is None:
            attention_mask = torch.ones(states.shape[:2], dtype=torch.int64, device=self.device)
        grown = self.empty_cache(self._facts["cache"], batch, cache.own[0].shape[2] + count)
        logits = self.empty(batch, count, self.vocab_size)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "encoder_hidden_states": states,
            "encoder_attention_mask": attention_mask.to(torch.int64),
            **named("past_key_values", cache.own),
            **named("cross", cache.cross),
        }
        self._decoder.run(inputs, {"logits": logits, **named("present", grown)})
        cache.own = grown
        return (logits[:, -1:] if last_only else logits).float()

    @torch.inference_mode()
    def keep_rows(self, cache: OnnxSeq2SeqCache, rows: torch.Tensor) -> None:
        """Keep only `rows` of the cache, in this order."""
        cache.own = [tensor[rows] for tensor in cache.own]
        cache.cross = [tensor[rows] for tensor in cache.cross]

    def cache_bytes(self, cache: OnnxSeq2SeqCache) -> int:
        """Memory of the cache, bytes."""
        return sum(tensor.nbytes for tensor in [*cache.own, *cache.cross])


class OnnxEncoderEngine(OnnxGraphs):
    """Runs `model.onnx` of an encoder; see `runtime.engines.base.EncoderEngine`."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        super().__init__(export, device, kernels, threads)
        self.hidden_size = int(export.facts["hidden_size"])

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Last hidden states, float32 `[batch, length, hidden]`; without a mask every token counts."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = self.empty(*input_ids.shape, self.hidden_size)
        inputs = {"input_ids": input_ids, "attention_mask": mask.to(torch.int64)}
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
        self.sessions[0].run(inputs, {"last_hidden_state": states})
        return states.float()


class OnnxEngine(OnnxGraphs, PastPresentEngine):
    """Runs `model.onnx` of a decoder; see `runtime.engines.rows.RowEngine`."""

    def __init__(self, export: Export, device: torch.device, kernels: str, threads: int | None) -> None:
        super().__init__(export, device, kernels, threads)
        self.cache_shapes, self.in_place = export.facts["cache"], bool(export.facts["shared_cache"])
        self.padding_is_exact, self.logits_dtype = "position_ids" in export.facts["inputs"], self.dtype

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        self.sessions[0].run(inputs, outputs)

    def part(self, batch: int, width: int, past: int) -> tuple[int, int]:
        """As many rows as their logits allow; a single row's long prompt goes through in chunks."""
        positions = max(1, past_present.LOGITS_BYTES // (4 * self.vocab_size))
        columns = min(width, positions)
        # ONNX Runtime's attention in place takes several tokens after a past for one row only.
        single = self.in_place and columns > 1 and past > 0
        return 1 if single else min(batch, positions // columns), columns


def load_onnx(export: Export, device: torch.device, options: EngineOptions) -> Any:
    """The engine of an ONNX export; called by `runtime.engines.choose.load_export`.

    Raises:
        RequestError: an option that ONNX exports do not take.
    """
    if options.max_memory is not None:
        raise RequestError(
            f"max_memory: ONNX Runtime holds all weights; load the artifact of {export.path} to stream them"
        )
    if options.dtype is not None and options.dtype != DTYPES.get(export.facts.get("dtype", "")):
        raise RequestError(f"dtype: {export.path} computes in {export.facts.get('dtype')}; export it again in another")
    kind = str(export.facts.get("kind"))
    if kind not in _ENGINES:
        raise ArtifactError(f"{export.path}: export.json has kind {kind!r}; known are {', '.join(_ENGINES)}")
    return _ENGINES[kind](export, device, options.kernels, options.threads)


_ENGINES = {"decoder": OnnxEngine, "encoder": OnnxEncoderEngine, "encoder-decoder": OnnxSeq2SeqEngine}
