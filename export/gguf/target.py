"""GGUF target; see `export.gguf`."""

from __future__ import annotations

import math

from export.gguf import check, families, metadata, plan, tokenizer, writer
from export.gguf.options import GgufOptions
from export.gguf.plan import Planned
from export.gguf.tokenizer import UnsupportedError, Vocabulary
from export.source import Source
from export.target import Conversion, Job, Target, Verification, missing_packages
from runtime.formats.grid import GridScheme
from runtime.formats.k_quant import KQuant

FILE = "model.gguf"


class GgufTarget(Target):
    """One GGUF file with weights, hyperparameters and tokenizer."""

    name = "gguf"
    summary = "One GGUF file for llama.cpp (Llama, Mistral, Qwen2, Qwen3)."
    extra = "gguf"
    packages = ("gguf",)
    options = GgufOptions
    representations = frozenset({GridScheme.name, KQuant.name})

    def __init__(self) -> None:
        self._made: tuple[Source, GgufOptions, list[Planned], Vocabulary | None] | None = None

    def why_not(self, source: Source, options: GgufOptions) -> str | None:
        reason = families.why_not(source) or metadata.why_not(source) or plan.why_not(source, options)
        if reason is not None or options.tokenizer == "none":
            return reason
        try:
            tokenizer.read(source)
        except UnsupportedError as error:
            return f"{error}; tokenizer=none writes the model without"
        return None

    def conversions(self, source: Source, options: GgufOptions) -> list[Conversion]:
        tensors, vocabulary = self._make(source, options)
        result = plan.conversions(source, tensors) + metadata.conversions(source)
        dropped = tuple(families.computed(source))
        if dropped:
            size = sum(source.artifact.checkpoint.nbytes(name) for name in dropped)
            what = "stored rotary frequencies are left out, llama.cpp computes them"
            result.append(Conversion(what, dropped, bytes=-size))
        return result + tokenizer.conversions(vocabulary)

    def bytes_needed(self, source: Source, options: GgufOptions) -> int:
        tensors, vocabulary = self._make(source, options)
        keys = {} if vocabulary is None else vocabulary.keys
        texts = sum(len(t.encode()) + 20 for name in ("token_list", "token_merges") for t in keys.get(name, ()))
        values = sum(math.prod(tensor.shape) for tensor in tensors)
        twin = 4 * values if values <= check.TWIN_VALUES and not missing_packages(("llama_cpp",)) else 0
        return sum(tensor.bytes + 256 for tensor in tensors) + 2 * texts + twin + (1 << 20)

    def write(self, job: Job) -> None:
        tensors, vocabulary = self._make(job.source, job.options)
        writer.write(job.folder / FILE, job, tensors, vocabulary)
        job.facts.update(
            file=FILE,
            architecture=families.find(job.source).architecture,
            main_type=metadata.main_type(tensors),
            types={kind: sum(t.bytes for t in tensors if t.type == kind) for kind in sorted({t.type for t in tensors})},
            context_length=metadata.context_length(job.source),
            tokenizer=vocabulary and {name: vocabulary.keys[f"tokenizer_{name}"] for name in ("model", "pre")},
        )

    def verify(self, job: Job) -> Verification:
        tensors, vocabulary = self._make(job.source, job.options)
        return check.check(job.folder / FILE, job, tensors, vocabulary)

    def usage(self, job: Job, folder: str) -> list[str]:
        ask = 'print(model("Once upon a time", max_tokens=32, temperature=0)["choices"][0]["text"])'
        if job.facts["tokenizer"] is None:
            ask = "model.eval([1, 2, 3])  # token ids: the file has no tokenizer"
        return [
            "from llama_cpp import Llama  # pip install llama-cpp-python",
            f'model = Llama("{folder}/{FILE}", n_ctx={min(2048, metadata.context_length(job.source))})',
            ask,
        ]

    def _make(self, source: Source, options: GgufOptions) -> tuple[list[Planned], Vocabulary | None]:
        """What is written, found once for each artifact and options."""
        if self._made is None or self._made[0] is not source or self._made[1] != options:
            vocabulary = None if options.tokenizer == "none" else tokenizer.read(source)
            self._made = (source, options, list(plan.plan(source, options)), vocabulary)
        return self._made[2], self._made[3]
