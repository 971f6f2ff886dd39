"""The proof: the file read back tensor by tensor, and llama.cpp run beside the artifact where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from export.gguf import llamacpp, pretokenizers, readback, tokenizer
from export.gguf.plan import Planned
from export.target import Job, Verification, missing_packages
from export.verify import compare_logits, compare_tokens, probe
from runtime.errors import CompressError

# Mean KL in nats a token, and how far apart (in logits) two tokens may be that change places. By what llama.cpp rounds:
# nothing (F32), inputs to 8 or 11 bits (BF16, F16), inputs to int8 in blocks of 32 (quantized), and, on top, what the artifact
# itself rounds and the file does not (activation grids). A wrong order of rows or a wrong rope gives KL far above all of them.
_LIMITS = {"float": (1e-6, 0.02), "half": (2e-3, 0.1), "blocks": (1e-2, 0.3), "activations": (5e-2, 0.6)}


def check(path: Path, job: Job, tensors: list[Planned], has_vocabulary: bool) -> Verification:
    """Raises CompressError where the file is not what the artifact is."""
    read = readback.compare(path, job, tensors)
    checked = f"{read['tensors']} tensors ({read['weights']:,} values) equal the artifact's to the last bit"
    if read["rounded"]:
        checked += f", {read['rounded']} are rounded by at most {read['error']:.2g}"
    metrics = {f"read_{name}": value for name, value in read.items()}
    if missing_packages(("llama_cpp",)):
        note = "tokens and logits were not compared because llama-cpp-python is not installed (pip install llama-cpp-python)"
        return Verification(f"gguf {_gguf_version()} (GGUFReader)", checked, metrics, [note])
    limit, tie = _LIMITS[_arithmetic(job, tensors)]
    reference = probe(job)
    notes: list[str] = []
    with llamacpp.Model(path, reference.rows.shape[1]) as model:
        if model.vocabulary != reference.logits.shape[-1]:
            raise CompressError(
                f"llama.cpp sees {model.vocabulary} tokens, the artifact has {reference.logits.shape[-1]}"
            )
        metrics |= compare_logits(reference, model.logits, kl_limit=limit)
        metrics |= compare_tokens(reference, model.generate, tie=tie)
        if has_vocabulary:
            metrics["same_token_ids"] = _same_ids(job, model, notes)
    checked += (
        f"; logits (KL up to {limit:g} allowed: {_REASONS[_arithmetic(job, tensors)]}) and greedy tokens in llama.cpp"
    )
    return Verification(llamacpp.version(), checked, metrics, notes)


_REASONS = {
    "float": "llama.cpp computes in float32",
    "half": "llama.cpp rounds the inputs of products to 16 bits",
    "blocks": "llama.cpp rounds the inputs of products to 8 bits",
    "activations": "the artifact and llama.cpp round the inputs of products differently",
}


def _arithmetic(job: Job, tensors: list[Planned]) -> str:
    if any(entry.scheme.activations is not None for entry in job.source.entries.values()):
        return "activations"
    kinds = {tensor.type for tensor in tensors if len(tensor.shape) == 2}
    if kinds == {"F32"}:
        return "float"
    return "half" if kinds <= {"F32", "F16", "BF16"} else "blocks"


def _same_ids(job: Job, model: llamacpp.Model, notes: list[str]) -> bool:
    """Whether llama.cpp and transformers cut a text with everything in it alike; a note says where not."""
    theirs: Any = tokenizer.load(job.source)
    expected = list(theirs.encode(pretokenizers.EVERYTHING))
    found = model.tokenize(pretokenizers.EVERYTHING, add_special=True)
    if found == expected:
        return True
    first = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    notes.append(
        f"llama.cpp tokenizes a test text otherwise than transformers: {len(found)} tokens for {len(expected)}, the first difference "
        f"at token {first}: {found[first : first + 3]} for {expected[first : first + 3]} "
        f"({theirs.decode(expected[first : first + 3])!r})"
    )
    return False


def _gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")
