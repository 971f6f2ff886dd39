"""Proof of an ONNX export: valid, fused, loaded back with `runtime.load`, and compared in float32 with the artifact, changed alike
where layers were rounded anew."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from export.onnx.change import Change, Expected, expect_changed, load_changed
from export.onnx.check import check_file, check_fused
from export.onnx.conversions import conversions
from export.onnx.dialect import dialect_of, fast_name
from export.onnx.grid import ONNX
from export.onnx.readback import read_back
from export.target import Job, Verification
from export.verify import TIE, Probe, compare_logits, compare_tokens, load_artifact, probe
from runtime.errors import CompressError

# Mean KL that is allowed. float32: only the order of sums differs; float16: every activation is rounded to 11 bits. Where
# activations are quantized, a sum in another order may put one of them on the neighbouring code.
KL_LIMITS = {("float32", False): 1e-5, ("float32", True): 5e-3, ("float16", False): 1e-2, ("float16", True): 2e-2}
TIES = {("float32", False): TIE, ("float32", True): 0.5, ("float16", False): 0.5, ("float16", True): 1.0}
# Of the second graph, whose products round their inputs to int8 in blocks, for kernels="fast": KL and cosine distance.
FAST_LIMIT = 5e-2
# Bytes of weights over those expected, and the difference that is nothing to speak of.
SIZE_LIMIT, SMALL = 1.05, 64 << 10
# Cosine distance of hidden states that is allowed, the worst of all tokens.
COSINE_LIMITS = {("float32", False): 1e-5, ("float32", True): 2e-2, ("float16", False): 1e-3, ("float16", True): 2e-2}


def prove(job: Job) -> Verification:
    """Load `job.folder` back and compare.

    Raises:
        CompressError: a graph is invalid, a compressed layer is not fused, or the numbers are not the artifact's.
    """
    import onnxruntime

    import runtime

    products = job.facts["compressed"]
    files = products if isinstance(products, dict) else {"model.onnx": products}
    job.progress.phase("loading back", 3 + len(files))
    fused: dict[str, int] = {}
    for file, compressed in files.items():
        second = job.folder / fast_name(file)
        for path in [job.folder / file] + ([second] if second.is_file() else []):
            check_file(path)
            counts = check_fused(path, compressed, job.facts.get("session"), half=job.options.dtype == "float16")
        for name, count in counts.items():
            fused[name] = fused.get(name, 0) + count
        job.progress.step(file)
    same = read_back(job, list(files))
    job.progress.step("codes and scales")
    quantized = any(entry.scheme.activations is not None for entry in job.source.entries.values())
    key = (job.options.dtype, quantized)
    compare = {"decoder": _decoder, "encoder": _encoder, "encoder-decoder": _seq2seq}[job.facts["kind"]]
    checked, metrics = compare(
        job, lambda **options: runtime.load(job.folder, device="cpu", verify=False, **options), key
    )
    metrics["size"] = size_ratio(job)
    held = (
        f"every compressed layer fused into its product, codes and scales of {same} layers bit for bit, "
        if same
        else ""
    )
    metrics["fused"] = ", ".join(f"{count} {name}" for name, count in fused.items()) or "nothing compressed"
    return Verification(
        f"onnx.checker and ONNX Runtime {onnxruntime.__version__} on the CPU through runtime.load",
        f"valid, {held}{checked}",
        metrics,
    )


def _decoder(job: Job, load: Any, key: tuple[str, bool]) -> tuple[str, dict[str, Any]]:
    expected = expect_changed(job.source, _change(job)) if job.losses else Expected(probe(job))
    reference = expected.probe
    job.progress.step("the artifact")
    model = load()
    metrics = compare_logits(reference, model.logits, KL_LIMITS[key]) | expected.change
    metrics |= compare_tokens(
        reference, lambda prompts, count: model.generate(prompts, max_new_tokens=count, ignore_eos=True), TIES[key]
    )
    if (job.folder / fast_name("model.onnx")).is_file():
        del model
        gc.collect()
        metrics["kl_fast"] = compare_logits(reference, load(kernels="fast").logits, FAST_LIMIT)["kl"]
    job.progress.step("the export")
    return "logits and greedy tokens those of the artifact", metrics


def _encoder(job: Job, load: Any, key: tuple[str, bool]) -> tuple[str, dict[str, Any]]:
    ids, mask = _sources(job)
    reference = _reference(job)
    wanted = reference.hidden_states(ids, mask)[mask.bool()]
    del reference
    change = {}
    if job.losses:
        original = load_artifact(job.source).hidden_states(ids, mask)[mask.bool()]
        change["cosine_of_change"] = float(torch.nn.functional.cosine_similarity(original, wanted, dim=-1).min())
        del original
    gc.collect()
    job.progress.step("the artifact")
    found = load().hidden_states(ids, mask)[mask.bool()]
    job.progress.step("the export")
    cosine = torch.nn.functional.cosine_similarity(wanted, found, dim=-1)
    metrics = {
        "cosine_mean": float(cosine.mean()),
        "cosine_worst": float(cosine.min()),
        "difference": float((wanted - found).abs().max()),
        "tokens": int(mask.sum()),
        **change,
    }
    if not metrics["cosine_worst"] >= 1 - COSINE_LIMITS[key]:
        raise CompressError(
            f"the export does not compute what the artifact does: cosine similarity of hidden states "
            f"{metrics['cosine_worst']:.6f}, allowed {1 - COSINE_LIMITS[key]:g}"
        )
    if (job.folder / fast_name("model.onnx")).is_file():
        fast = load(kernels="fast").hidden_states(ids, mask)[mask.bool()]
        metrics["cosine_fast"] = float(torch.nn.functional.cosine_similarity(wanted, fast, dim=-1).min())
        if not metrics["cosine_fast"] >= 1 - FAST_LIMIT:
            raise CompressError(
                f"the export's graph for kernels='fast' computes something else: cosine similarity {metrics['cosine_fast']:.6f}"
            )
    return "hidden states those of the artifact, alone and padded", metrics


def _seq2seq(job: Job, load: Any, key: tuple[str, bool]) -> tuple[str, dict[str, Any]]:
    ids, mask = _sources(job)
    sources = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    reference, length = _reference(job), 16
    written = reference.generate(sources, max_new_tokens=length, ignore_eos=True)
    targets = torch.tensor([[reference.start_token_id, *row[:-1]] for row in written])

    def forced(model: Any) -> torch.Tensor:
        return torch.cat([model.logits(torch.tensor([s]), t[None]) for s, t in zip(sources, targets, strict=True)])

    # The decoder's prompts are the token that it starts with.
    expected = Probe([row[:1].tolist() for row in targets], targets, forced(reference), written)
    del reference
    change = {}
    if job.losses:
        original = replace(expected, logits=forced(load_artifact(job.source)))
        change["kl_of_change"] = compare_logits(original, lambda rows: expected.logits, float("inf"))["kl"]
        del original
    gc.collect()
    job.progress.step("the artifact")
    model = load()
    metrics = compare_logits(expected, lambda rows: forced(model), KL_LIMITS[key]) | change
    metrics |= compare_tokens(
        expected, lambda prompts, count: model.generate(sources, max_new_tokens=count, ignore_eos=True), TIES[key]
    )
    if (job.folder / fast_name("decoder.onnx")).is_file():
        del model
        fast = forced(load(kernels="fast"))
        metrics["kl_fast"] = compare_logits(expected, lambda rows: fast, FAST_LIMIT)["kl"]
    job.progress.step("the export")
    return "teacher-forced logits and greedy tokens those of the artifact", metrics


def _change(job: Job) -> Change:
    """Layers that the writer rounded anew; every dialect of this target rounds by the same rules."""
    return Change(ONNX, frozenset(job.losses))


def _reference(job: Job) -> Any:
    """The model that the export must compute what it does: the artifact's, or that with the same layers rounded anew."""
    return load_changed(job.source, _change(job)) if job.losses else load_artifact(job.source)


def _sources(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[8, 16]` of different lengths; ids at random, since encoders write no texts of their own."""
    generator = torch.Generator().manual_seed(0)
    limit = min(16, int(job.facts.get("context_length") or 16))
    ids = torch.randint(2, int(job.facts["vocab_size"]), (8, limit), generator=generator)
    lengths = torch.tensor([max(1, limit - i) for i in range(8)])
    mask = (torch.arange(limit)[None] < lengths[:, None]).long()
    return ids * mask, mask


def size_ratio(job: Job) -> float:
    """Bytes of the weights' files over those of the artifact's tensors and what conversions were said to add; warns beyond 5 %."""
    stored = sum(file.stat().st_size for file in job.folder.glob("*.data"))
    if not stored:  # a small model's constants are in the graph
        stored = sum(file.stat().st_size for file in job.folder.glob("*.onnx"))
    said = conversions(job.source, dialect_of(job.options))
    expected = job.source.bytes + sum(conversion.bytes or 0 for conversion in said)
    ratio = stored / expected
    if ratio > SIZE_LIMIT and stored - expected > SMALL:
        job.progress.warn(
            f"the weights take {ratio:.2f} times the bytes that the artifact and the conversions said account for"
        )
    return round(ratio, 4)
