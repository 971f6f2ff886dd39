"""Proof of a GGUF file: read back tensor by tensor, and llama.cpp run beside the artifact where it is installed.

llama.cpp rounds what it multiplies, so its logits cannot show that everything else (names, order of rows, rotary embedding,
epsilons) is right to the last digit. A twin of the file with float32 matrices can: with it llama.cpp computes in float32. The
file's own values were compared bit for bit before, so the twin is written from the same values and removed afterwards.
"""

from __future__ import annotations

import ctypes
import math
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from export.gguf import families, grids, metadata, pretokenizers, tokenizer, writer
from export.gguf.plan import DTYPES, Planned
from export.gguf.tokenizer import Vocabulary
from export.source import Source
from export.target import Job, Verification, missing_packages
from export.verify import Probe, compare, probe
from runtime.errors import CompressError

# What llama.cpp (or the artifact) rounds: (mean KL allowed, nats a token; how far apart, in logits, two tokens may be that change
# places; why). Measured on the bundled model: 4e-5 half, 4e-4 blocks, 1e-3 int8 and 8e-3 float8 activations; rows of q and k left
# in their order give 1 and more.
_LIMITS = {
    "float": (1e-6, 0.02, "llama.cpp computes in float32"),
    "half": (2e-3, 0.3, "llama.cpp rounds the inputs of products to 16 bits"),
    "blocks": (1e-2, 1.0, "llama.cpp rounds the inputs of products to 8 bits"),
    "activations": (5e-2, 2.0, "the artifact and llama.cpp round the inputs of products differently"),
    "anew": (0.5, math.inf, "weights were rounded anew"),
}
_ROWS = 4096  # dequantized at once
TWIN_VALUES = 1 << 28  # the twin is written for models of at most so many values (1 GiB)


def check(path: Path, job: Job, tensors: list[Planned], vocabulary: Vocabulary | None) -> Verification:
    """Raises CompressError where the file is not what the artifact is."""
    read = read_back(path, job, tensors)
    checked = f"{read['tensors']} tensors ({read['weights']:,} values) equal the artifact's to the last bit"
    if read["rounded"]:
        checked += f", {read['rounded']} are rounded by at most {read['error']:.2g}"
    metrics = {f"read_{name}": value for name, value in read.items()}
    if missing_packages(("llama_cpp",)):
        from importlib.metadata import version

        note = "tokens and logits were not compared because llama-cpp-python is not installed (pip install llama-cpp-python)"
        return Verification(f"gguf {version('gguf')} (GGUFReader)", checked, metrics, [note])
    import llama_cpp

    notes: list[str] = []
    reference = probe(job)
    checked += "; " + _run(path, reference, metrics, "", _arithmetic(job, tensors))
    if any(entry.scheme.activations is not None for entry in job.source.entries.values()):
        notes.append(
            "the artifact rounds activations and the file does not say so: tokens are those of the weights alone"
        )
    elif sum(math.prod(tensor.shape) for tensor in tensors) > TWIN_VALUES:
        notes.append("the model is too large for the check with float32 matrices; llama.cpp ran with the file as it is")
    else:
        twin = path.with_suffix(".float32.tmp")
        opened = [replace(tensor, type="F32", exact=True, anew=False) for tensor in tensors]
        try:
            writer.write(twin, replace(job, losses={}), opened, vocabulary)
            found = _run(twin, reference, metrics, "float32_", "float")
        finally:
            twin.unlink(missing_ok=True)
        checked += f"; the same with its matrices in float32: {found}"
    if vocabulary is not None:
        with LlamaModel(path, 32) as model:
            metrics["same_token_ids"] = _same_ids(job, model, vocabulary, notes)
    return Verification(f"llama-cpp-python {llama_cpp.__version__}", checked, metrics, notes)


def _arithmetic(job: Job, tensors: list[Planned]) -> str:
    """The key of `_LIMITS`."""
    if job.losses:
        return "anew"
    if any(entry.scheme.activations is not None for entry in job.source.entries.values()):
        return "activations"
    kinds = {tensor.type for tensor in tensors if len(tensor.shape) == 2}
    if kinds == {"F32"}:
        return "float"
    return "half" if kinds <= {"F32", "F16", "BF16"} else "blocks"


def _run(path: Path, reference: Probe, metrics: dict[str, Any], prefix: str, kind: str) -> str:
    """Compare logits and greedy tokens in llama.cpp; the metrics get `prefix`. Returns what was done, in a clause."""
    limit, tie, why = _LIMITS[kind]
    with LlamaModel(path, reference.rows.shape[1]) as model:
        if model.vocabulary != reference.logits.shape[-1]:
            raise CompressError(f"llama.cpp sees {model.vocabulary} tokens, not {reference.logits.shape[-1]}")
        found = compare(reference, model.logits(reference.rows), limit, tie)
    metrics.update({f"{prefix}{name}": value for name, value in found.items()})
    return f"logits and greedy tokens in llama.cpp (KL up to {limit:g} is allowed: {why})"


def _same_ids(job: Job, model: LlamaModel, vocabulary: Vocabulary, notes: list[str]) -> bool:
    """Whether llama.cpp and transformers cut a text with everything in it alike; a note says where not."""
    theirs: Any = tokenizer.load(job.source)
    text = pretokenizers.EVERYTHING
    if vocabulary.composed:  # that llama.cpp does not compose characters has been said
        text = unicodedata.normalize("NFC", text)
    expected = list(theirs.encode(text))
    found = model.tokenize(text)
    if found == expected:
        return True
    pairs = zip(expected, found, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    notes.append(
        f"llama.cpp tokenizes a test text otherwise than transformers: {len(found)} tokens for {len(expected)}, the first difference "
        f"at token {first}: {found[first : first + 3]} for {expected[first : first + 3]} "
        f"({theirs.decode(expected[first : first + 3])!r})"
    )
    return False


def read_back(path: Path, job: Job, tensors: list[Planned]) -> dict[str, Any]:
    """`tensors` and `weights` (how many values) that are bit for bit the artifact's `(q - z) * scale`, `rounded` tensors, and the
    largest `error` of those.

    Raises:
        CompressError: a tensor is missing, one too many, or not what was written; a rounded one is further off than recorded.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = {tensor.name for tensor in tensors}
    if metadata.rope_factors(job.source) is not None:
        expected.add(metadata.ROPE_FREQS)
    if set(found) != expected:
        raise CompressError(f"{path.name} has other tensors than planned: {sorted(set(found) ^ expected)[:3]}")
    job.progress.phase("reading back", len(tensors))
    exact = weights = rounded = 0
    worst = 0.0
    for tensor in tensors:
        stored = found[tensor.name]
        shape = tuple(int(size) for size in reversed(stored.shape))
        if (stored.tensor_type.name, shape) != (tensor.type, tuple(tensor.shape)):
            raise CompressError(f"{tensor.name} was read back as {stored.tensor_type.name} of {stored.shape.tolist()}")
        error = _error(job.source, tensor, stored.data)
        recorded = job.losses.get(tensor.module or tensor.parameter, 0.0)
        if error > recorded * (1 + 1e-6):
            away = f"{error:.3g} away from the artifact's {tensor.parameter}"
            raise CompressError(f"{tensor.name} is {away}, allowed {recorded:.3g}")
        exact, rounded = exact + (error == 0), rounded + (error > 0)
        weights += stored.n_elements if error == 0 else 0
        worst = max(worst, error)
        job.progress.step(tensor.name)
    return {"tensors": exact, "weights": int(weights), "rounded": rounded, "error": worst}


def _error(source: Source, tensor: Planned, data: Any) -> float:
    """||W' - W|| / ||W|| of a stored tensor; 0 exactly where every value is the artifact's."""
    wanted, rows = _wanted(source, tensor), data.reshape(tensor.shape[0], -1)
    if tensor.heads is not None:
        wanted = wanted[families.permuted_rows(tensor.shape[0], tensor.heads)]

    def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, tensor.shape[0], _ROWS):
            # a copy: the reader's arrays are the file itself
            raw = torch.from_numpy(numpy.array(rows[start : start + _ROWS]).view(numpy.uint8))
            yield wanted[start : start + _ROWS].float(), writer.decode(raw, tensor.type)

    return writer.loss(parts())


def _wanted(source: Source, tensor: Planned) -> torch.Tensor:
    """The artifact's values, `tensor.shape`, in a dtype that holds them."""
    if tensor.module is None:
        return source.dense(tensor.parameter)
    dtype = DTYPES[tensor.type] if tensor.type in DTYPES and tensor.exact else torch.float32
    return torch.cat([value.to(dtype) for _, value in grids.values(source.weight(tensor.module))])


class LlamaModel:
    """A file loaded by llama.cpp, through llama-cpp-python's low-level bindings, on the CPU. Use as a context manager.

    The cache of keys and values is float32 and flash attention off, so that what differs from the artifact is what llama.cpp makes of
    the weights. It rounds the input of every product with a quantized matrix to 8 bits (`Q8_0`, `Q8_1`), of one with a BF16 or F16
    matrix to that type; with F32 matrices it computes in float32.

    Args:
        path: the .gguf file.
        context: tokens that fit.
    """

    def __init__(self, path: Path, context: int) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise CompressError(f"llama.cpp does not load {path.name}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = asked.n_batch = asked.n_ubatch = context
        asked.n_threads = asked.n_threads_batch = torch.get_num_threads()
        asked.type_k = asked.type_v = llama_cpp.GGML_TYPE_F32
        asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, asked)
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise CompressError(f"llama.cpp makes no context of {context} tokens for {path.name}")
        self._batch = llama_cpp.llama_batch_init(context, 0, 1)
        self._limit = context

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *error: object) -> None:
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[batch, seq, vocab]` of ids `[batch, seq]`."""
        return torch.stack([self._row(row) for row in ids.tolist()])

    def tokenize(self, text: str) -> list[int]:
        """Token ids, those that are added among them; special tokens in the text are taken for such."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (self._c.llama_token * room)()
        count = self._c.llama_tokenize(self._vocab, raw, len(raw), ids, room, True, True)
        if count < 0:
            raise CompressError("llama.cpp could not tokenize the test text")
        return list(ids[:count])

    def _row(self, ids: list[int]) -> torch.Tensor:
        """Logits `[n, vocab]` of every position of a new sequence."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        if len(ids) > self._limit:
            raise CompressError(f"{len(ids)} tokens do not fit into a context of {self._limit}")
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = True
        code = self._c.llama_decode(self._context, batch)
        if code != 0:
            raise CompressError(f"llama.cpp failed on {len(ids)} tokens (llama_decode gave {code})")
        out = torch.empty(len(ids), self.vocabulary)
        for i in range(len(ids)):
            ctypes.memmove(out[i].data_ptr(), self._c.llama_get_logits_ith(self._context, i), self.vocabulary * 4)
        return out
