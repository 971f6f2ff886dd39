"""How an engine or a bundle is proven: rules, ONNX's own checker, tokens in ONNX Runtime; tokens on the GPU.

A bundle takes along what the artifact said of a few texts, so that the machine that finishes it, which has no artifact, can compare.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from export.tensorrt.bundle import PROBE
from export.tensorrt.rules import check
from export.verify import Probe, compare_logits, compare_tokens
from runtime.decoding.loop import pad_left
from runtime.errors import CompressError

BEST = 16  # logits kept of a position; the others count as impossible
#: Distance of two logits that arithmetic of this precision may swap; see `export.verify.TIE` for float32.
TIES = {"FLOAT": 0.02, "HALF": 0.1, "BF16": 0.5}
KL_LIMITS = {"FLOAT": 1e-3, "HALF": 0.01, "BF16": 0.05}
KL_CHANGED = 2.0  # where weights were rounded anew or activations are no longer rounded; the figure is reported


def save_probe(probe: Probe, folder: Path) -> None:
    """Write the probe with the best logits of each position."""
    from safetensors.torch import save_file

    best = probe.logits.topk(min(BEST, probe.logits.shape[-1]), dim=-1)
    tensors = {
        "rows": probe.rows.contiguous(),
        "logits": best.values.contiguous(),
        "ids": best.indices.contiguous(),
        "prompt_lengths": torch.tensor([len(p) for p in probe.prompts]),
    }
    facts = {"vocabulary": str(probe.logits.shape[-1]), "new_tokens": str(len(probe.continuations[0]))}
    save_file(tensors, folder / PROBE, metadata=facts)


def load_probe(folder: Path) -> Probe | None:
    """The probe of a bundle; logits that were not kept are minus infinity. None where the bundle has none.

    Raises:
        CompressError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / PROBE).is_file():
        return None
    try:
        with safe_open(folder / PROBE, "pt") as file:
            facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        rows, lengths, count = tensors["rows"], tensors["prompt_lengths"].tolist(), int(facts["new_tokens"])
        logits = torch.full((*rows.shape, int(facts["vocabulary"])), float("-inf"))
        logits.scatter_(-1, tensors["ids"], tensors["logits"])
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CompressError(f"{folder / PROBE} is damaged: {error}") from error
    prompts = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    continuations = [row[length : length + count].tolist() for row, length in zip(rows, lengths, strict=True)]
    return Probe(prompts, rows, logits, continuations)


def compare(
    probe: Probe,
    logits: Callable[[torch.Tensor], torch.Tensor],
    generate: Callable[[list[list[int]], int], list[list[int]]],
    dtype: str,
    changed: bool,
) -> dict[str, Any]:
    """Tokens and logits of an engine beside the artifact's.

    Args:
        dtype: `DataType` member that it computes in; says how far rounding may go.
        changed: it has not the artifact's own numbers (rounded anew, activations not rounded); tokens may then differ.

    Raises:
        CompressError: it does not compute what the artifact computes.
    """
    if bool(probe.logits.isinf().any()):  # a probe of a bundle: the best logits only
        metrics = _compare_best(probe, logits(probe.rows))
    else:
        metrics = compare_logits(probe, logits, KL_CHANGED if changed else KL_LIMITS[dtype])
    return metrics if changed else metrics | compare_tokens(probe, generate, TIES[dtype])


def _compare_best(probe: Probe, logits: torch.Tensor) -> dict[str, Any]:
    """`top1_agreement` and the largest difference among the logits that were kept."""
    other = logits.float().cpu()
    if other.shape != probe.logits.shape or not bool(other.isfinite().all()):
        raise CompressError("the engine gives logits of another shape than the artifact, or some that are not finite")
    kept = probe.logits.isfinite()
    return {
        "top1_agreement": float((other.argmax(-1) == probe.logits.argmax(-1)).float().mean()),
        "logit_difference": float((other - probe.logits)[kept].abs().max()),
    }


def check_model(path: Path) -> int:
    """The rules and ONNX's checker over a bundle's ONNX file; returns how many rules held.

    Raises:
        CompressError: a rule is broken, or the file is no valid ONNX.
    """
    import onnx

    broken, count = check(path)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise CompressError(f"TensorRT would refuse {path.name}: {broken[0].sentence()}{more}")
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise CompressError(f"{path.name} is not valid ONNX: {str(error).splitlines()[0]}") from error
    return count


class OnnxRuntime:
    """The bundle's graph in ONNX Runtime on the CPU. The graph is the contract of `export.tensorrt.profiles.parsed_profiles`.

    Raises:
        NoKernelError: ONNX Runtime has no kernel for one of its operators or types.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.version = str(onnxruntime.__version__)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # The graph as it is written: fused, 4-bit products would round their inputs to int8, and fp8 ones are refused.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # it raises its own, unexported classes
            raise NoKernelError(str(error).splitlines()[0]) from error
        self._past = {i.name: i for i in self._session.get_inputs() if i.name.startswith("past_key_values.")}
        self._takes = {i.name for i in self._session.get_inputs()}

    def run(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: dict[str, Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Logits float32 `[batch, sequence, vocabulary]`, and what is `past` for the next step."""
        import numpy as np

        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()}
        feed = {name: value for name, value in feed.items() if name in self._takes}
        for name, value in self._past.items():
            kind = np.float16 if "float16" in value.type else np.float32
            feed[name] = past[name] if past else np.zeros((ids.shape[0], value.shape[1], 0, value.shape[3]), kind)
        names = ["logits", *(name.replace("past_key_values.", "present.") for name in self._past)]
        try:
            logits, *present = self._session.run(names, feed)
        except Exception as error:
            raise NoKernelError(str(error).splitlines()[0]) from error
        return torch.from_numpy(logits).float(), dict(zip(self._past, present, strict=True))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Of every position, `[batch, sequence, vocabulary]`."""
        positions = torch.arange(rows.shape[1]).expand_as(rows)
        return self.run(rows, torch.ones_like(rows), positions, None)[0]

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuations of prompts of any lengths, as one batch padded on the left, through the cache."""
        ids, found, positions = pad_left(prompts, torch.device("cpu"))
        mask = torch.ones_like(ids) if found is None else found
        past: dict[str, Any] | None = None
        written: list[torch.Tensor] = []
        for _ in range(count):
            logits, past = self.run(ids, mask, positions, past)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            written.append(ids)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
            positions = positions[:, -1:] + 1
        rows: list[list[int]] = torch.cat(written, 1).tolist()
        return rows


class NoKernelError(Exception):
    """ONNX Runtime cannot run the graph; the message is its own."""
