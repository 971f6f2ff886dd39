"""Proof of a checkpoint: loaded by others' code and compared with the artifact."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from export.huggingface import load_gptqmodel
from export.huggingface.plan import Plan
from export.source import distance, dtype_name, in_float32
from export.target import Job, Verification
from export.verify import Probe, compare, compare_logits, probe
from runtime.errors import CompressError, first_line
from runtime.formats.block_float import BlockFloat
from runtime.system.processes import how_it_ended

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Mean KL (nats a token), and distance of two logits that may swap. Matrices are compared number by number; one side may round them to
# the model's dtype before it multiplies (1e-5).
SAME = (1e-4, 0.1)
ROUNDED = (1e-2, 0.5)  # activations are rounded at run time (one flip moves a whole step), or weights were rounded anew
_ENGINES = "vLLM and SGLang were not run; what their kernels take was checked against their sources"


def verify_compressed(job: Job, plan: Plan) -> Verification:
    """The folder through `AutoModelForCausalLM.from_pretrained`, in float32; with block floats, which compressed-tensors (0.20) unpacks to
    bfloat16 whatever the model has, in that."""
    schemes = [entry.scheme for entry in plan.entries.values()]
    blocks = any(isinstance(scheme.weights, BlockFloat) for scheme in schemes)
    dtype = torch.bfloat16 if blocks else torch.float32
    model = load_transformers(job.folder, job.source.trust_remote_code, dtype)
    rounded = any(scheme.activations is not None for scheme in schemes)
    # In 16 bits the reference alone rounds inputs to the codes that compressed-tensors makes of them.
    reference = probe(job, dtype=dtype_name(dtype), kernels="reference" if blocks and rounded else "auto")
    metrics = compare_model(reference, model, not blocks and not job.losses and not rounded)
    metrics = _check_unpacked(job, plan, model) | metrics  # compressed-tensors unpacks at the first forward
    loader = f"transformers {version('transformers')}"
    if plan.entries:
        loader += f" and compressed-tensors {version('compressed-tensors')}"
    checked = f"every matrix, logits and greedy tokens, {dtype_name(dtype)} on the CPU"
    return Verification(loader, checked, metrics, [_ENGINES])


def verify_gptq(job: Job, plan: Plan) -> Verification:
    """Every matrix through an independent reader, the model those make, and GPTQModel where it is installed."""
    folder = GptqFolder(job.folder)
    if sorted(folder.modules) != sorted(plan.entries):
        raise CompressError("the export does not hold the layers that were planned")
    tensors: dict[str, torch.Tensor] = {}
    for name in folder.modules:
        tensors[f"{name}.weight"] = matrix = torch.from_numpy(folder.dequantize(name))
        _check_matrix(job, name, matrix)
    model = _fill(job, tensors)
    reference = probe(job)
    metrics = {"matrices": len(folder.modules)} | compare_model(reference, model, not job.losses)
    del model, tensors
    checked = "every matrix (an independent reader), logits and greedy tokens of the model they make"
    checked, loader, notes = f"{checked}, float32 on the CPU", "numpy", [_ENGINES]
    if importlib.util.find_spec("gptqmodel") is None:
        notes.insert(0, "GPTQModel is not installed here, so its loader was not run (pip install gptqmodel)")
    else:
        metrics |= verify_with_gptqmodel(job.folder, reference, sys.executable)
        loader += f" and gptqmodel {version('gptqmodel')}"
        checked += "; the same through GPTQModel's loader"
    return Verification(loader, checked, metrics, notes)


def verify_with_gptqmodel(
    folder: Path, reference: Probe, python: str, loader: str = "gptqmodel", environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """`LOADER_*` metrics of the folder loaded by GPTQModel in a process of its own (`load_gptqmodel`).

    Args:
        python: the interpreter to use; gptqmodel must be installed there, this package need not.
        loader: "gptqmodel", or "transformers" for its GPTQ loader, which needs optimum there.
        environment: of the process; None is this one's.

    Raises:
        CompressError: it does not load, or does not compute what the artifact does.
    """
    script = Path(load_gptqmodel.__file__)
    with tempfile.TemporaryDirectory() as temporary:
        asked, answered = Path(temporary) / "asked.npy", Path(temporary) / "answered.npz"
        np.save(asked, reference.rows.numpy())
        command = [python, str(script), str(folder), str(asked), str(answered), loader]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
        if done.returncode < 0:
            raise CompressError(f"the process that loads the export with GPTQModel {how_it_ended(done.returncode)}")
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CompressError(f"GPTQModel does not load the export: {last}")
        with np.load(answered) as content:
            logits, half = (torch.from_numpy(content[name]) for name in ("logits", "half_logits"))
    found = compare(reference, logits, *ROUNDED)
    result = {f"{loader}_{name}": value for name, value in found.items()}
    # as it computes by itself: float16 weights and activations
    served = compare_logits(reference, lambda rows: half, ROUNDED[0])
    return result | {f"{loader}_float16_kl": served["kl"], f"{loader}_float16_top1": served["top1_agreement"]}


def load_transformers(
    folder: Path, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained`; CompressError where it fails or finds tensors missing or left over."""
    from transformers import AutoModelForCausalLM

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of two libraries
            result: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
            )
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, ImportError, AttributeError) as error:
        raise CompressError(f"transformers does not load the export: {first_line(error)}") from error
    model, info = result
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(what) or ()))
        if names:
            what = what.replace("_", " ")
            raise CompressError(f"transformers finds {what} in the export: {names[0]} ({len(names)} in all)")
    return model.eval()


def compare_model(reference: Probe, model: Any, exact: bool = False) -> dict[str, Any]:
    """Logits and greedy tokens of a transformers model; CompressError where they are not the reference's."""
    # compressed-tensors unpacks now, with a bar
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
        logits: torch.Tensor = model(input_ids=reference.rows, use_cache=False).logits
    return compare(reference, logits, *(SAME if exact else ROUNDED))


def _check_unpacked(job: Job, plan: Plan, model: PreTrainedModel) -> dict[str, Any]:
    """Each matrix as transformers unpacked it must be the artifact's, as its codes say or rounded to the model's dtype."""
    rounded = 0
    for name in plan.entries:
        weight = job.source.weight(name)
        found: Any = model.get_submodule(name).weight.detach()  # type: ignore[union-attr, operator]
        exact, narrow = in_float32(weight), weight.dtype if found.dtype == torch.float32 else found.dtype
        if torch.equal(found.float(), exact):
            continue
        if not torch.equal(found.float(), exact.to(narrow).float()):
            raise CompressError(f"{name} as transformers unpacks it is not the artifact's matrix")
        rounded += 1
    return {"matrices": len(plan.entries), "rounded_by_transformers": rounded}


def _check_matrix(job: Job, module: str, found: torch.Tensor) -> None:
    expected = in_float32(job.source.weight(module))
    if module in job.losses:
        error = distance(expected, found)
        if error > 1.01 * job.losses[module] + 1e-7:
            raise CompressError(f"{module} in the export is {error:.3g} from the artifact's; scales alone cost less")
    elif not torch.equal(found, expected):
        raise CompressError(f"{module} in the export is not the artifact's matrix")


def _fill(job: Job, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model of these matrices and of the dense tensors as they lie in the export, in float32."""
    from safetensors import safe_open

    model = job.source.build(torch.float32)
    inside = {f"{name.removesuffix('.weight')}.{part}" for name in tensors for part in PARTS}
    state = dict(tensors)
    for file in sorted(job.folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118
                if name not in inside:
                    state[name] = stream.get_tensor(name).float()
    result = model.load_state_dict(state, strict=False, assign=True)
    missing = sorted(set(result.missing_keys) - set(job.source.tied))
    if missing or result.unexpected_keys:
        name = (missing or result.unexpected_keys)[0]
        what = "missing" if missing else "left over"
        raise CompressError(f"the export's tensors are not the model's: {name} is {what}")
    model.tie_weights()
    return model


PARTS = ("qweight", "qzeros", "scales", "g_idx")


class GptqFolder:
    """A GPTQ checkpoint: `modules` are the names that have a `qweight`.

    Its reader shares no code with the writer: numpy, bit by bit. Of config.json it reads the checkpoint format only; bits and groups
    are told by the shapes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        quantization = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        self.zero_offset = {"gptq": 1, "gptq_v2": 0}[quantization["checkpoint_format"]]
        self.files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with _open(file) as stream:
                self.files |= dict.fromkeys(stream.keys(), file)
        self.modules = [name.removesuffix(".qweight") for name in self.files if name.endswith(".qweight")]

    def get(self, name: str) -> np.ndarray:
        """A stored tensor, as it lies in its file."""
        with _open(self.files[name]) as stream:
            return np.asarray(stream.get_tensor(name))

    def dequantize(self, module: str) -> np.ndarray:
        """float32 `[out, in]`."""
        qweight, qzeros, scales, g_idx = (self.get(f"{module}.{part}") for part in PARTS)
        return dequantize(qweight, qzeros, scales, g_idx, self.zero_offset)


def dequantize(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray, zero_offset: int
) -> np.ndarray:
    """float32 `[out, in]` out of the four tensors; `zero_offset` is what the format takes off its zero points."""
    columns, rows = g_idx.shape[0], scales.shape[1]
    bits = qweight.shape[0] * 32 // columns
    codes = unpack(qweight.T, bits, columns)  # [out, in]
    zeros = unpack(qzeros, bits, rows) + zero_offset  # [groups, out]
    return ((codes - zeros[g_idx].T) * scales.astype(np.float32)[g_idx].T).astype(np.float32)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 words `[n, w]` -> unsigned codes `[n, count]`: bit j of code i is bit i * bits + j of the row, low bits first."""
    rows = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    stream = np.unpackbits(rows, axis=1, bitorder="little")[:, : count * bits]
    return stream.reshape(len(words), count, bits).astype(np.int64) @ (1 << np.arange(bits))


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(file), framework="numpy")
