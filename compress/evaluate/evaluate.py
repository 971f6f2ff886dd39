"""Measurement of a model on text: perplexity (also through a compressed cache), KL divergence from a reference, size, speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.evaluate.metrics import TokenMetrics, rows_at_once
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.data import EvaluationData
    from runtime.api.model import Model
    from runtime.checkpoint.artifact import Artifact
    from runtime.checkpoint.export_directory import Export


def evaluate(
    model: str | Path | Model,
    text: str | Path = "bundled",
    *,
    windows: torch.Tensor | None = None,
    sequence_length: int | None = None,
    samples: int | None = None,
    batch_size: int = 8,
    reference: str | Path | Model | None = None,
    load_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Perplexity of a model on text, and how far it is from a reference.

    The text is cut into windows of `sequence_length` tokens without overlap; every token but the first of a window is scored.
    Model and reference run in lockstep, batch by batch, so no logits are kept. Whole windows are scored without a cache; if the model
    has a policy, the effect of its compressed cache is measured apart (`compress.evaluate.through_cache`).

    Args:
        model: an artifact, a plain checkpoint, or a loaded model.
        text: `bundled` (the held-out text that comes along), a .txt, .jsonl or .parquet file, or the id of a data set.
        windows: token ids `[n, sequence_length]` instead of a text.
        sequence_length: tokens of a window; default 256, or the model's context when that is shorter.
        samples: only the first windows; None takes all.
        batch_size: windows in one forward pass.
        reference: the model to compare with, usually the uncompressed one; it must have the same tokenizer.
        load_options: for `runtime.load` where a path is given: device, kernels, dtype, kv_cache (None: the artifact's own policy,
            False: a plain cache), ... A reference has a plain cache, whatever they say (behind prefix tokens, if it
            needs them).

    Returns:
        `perplexity`, `nll`, `tokens`, `evaluated_on` (the text in words), `sequence_length`, `windows`, `seconds`, `tokens_per_second` (of
        `model` alone), and what `sizes` says; with a policy what `through_cache` says (`perplexity_with_cache`,
        `perplexity_increase_with_cache`, `kv_cache`); with a reference `kl`, `top1_agreement`, `perplexity_increase` and `reference` (its
        perplexity and sizes).

    Raises:
        RequestError: a path or a text that cannot be used, values out of range, a reference with another tokenizer, a policy that
            the model cannot have.
        CompressError: the model gives NaN.
    """
    if batch_size < 1:
        raise RequestError(f"batch_size must be at least 1, not {batch_size}")
    trust = bool((load_options or {}).get("trust_remote_code", False))
    ours = _loaded(model, load_options)
    base = None if reference is None else _reference(reference, load_options or {})
    if base is not None:
        _check_same_tokens(ours, base)
    evaluated_on = "the given windows"
    if windows is None:
        data = _text(ours, text, sequence_length, samples)
        windows, evaluated_on = data.ids, data.description
    elif windows.dim() != 2 or windows.shape[1] < 2 or not len(windows):
        raise RequestError(f"windows must be token ids of shape [n, at least 2], not {list(windows.shape)}")
    metrics, reference_metrics = TokenMetrics(), TokenMetrics()
    seconds = 0.0
    for rows in windows.split(rows_at_once(windows, ours.engine.vocab_size, batch_size)):
        start = time.perf_counter()
        logits = ours.logits(rows)
        if logits.is_cuda:  # measure the computation, not its launch
            torch.cuda.synchronize(logits.device)
        seconds += time.perf_counter() - start
        targets = rows[:, 1:].reshape(-1)
        reference_logits = None
        if base is not None:
            reference_logits = base.logits(rows)[:, :-1].flatten(0, 1)
            reference_metrics.add(reference_logits, targets)
        metrics.add(logits[:, :-1].flatten(0, 1), targets, reference_logits)
    result = metrics.result() | {
        "evaluated_on": evaluated_on,
        "sequence_length": int(windows.shape[1]),
        "windows": len(windows),
        "seconds": seconds,
        "tokens_per_second": windows.numel() / seconds,
        **sizes(ours, trust),
    }
    if ours.engine.policy is not None:
        from compress.evaluate.through_cache import through_cache

        result |= through_cache(ours, windows, batch_size)
    if base is not None:
        result["reference"] = {"perplexity": reference_metrics.result()["perplexity"], **sizes(base, trust)}
        result["perplexity_increase"] = result["perplexity"] / result["reference"]["perplexity"] - 1
    return result


def _loaded(model: str | Path | Model, options: Mapping[str, Any] | None) -> Model:
    if not isinstance(model, (str, Path)):
        return model
    import runtime

    loaded = runtime.load(model, **(options or {}))
    if not isinstance(loaded, runtime.Model):
        raise RequestError(f"{model} holds a {type(loaded).__name__}; perplexity is measured of causal language models")
    return loaded


def _reference(model: str | Path | Model, options: Mapping[str, Any]) -> Model:
    """With a plain cache; behind its prefix tokens where its static activations need them."""
    from runtime.api.load import refuse_unfinished
    from runtime.checkpoint.artifact import Artifact
    from runtime.checkpoint.export_directory import find_export
    from runtime.formats.quantization_config import static_prefix

    plain: Any = False
    if isinstance(model, (str, Path)):
        export = find_export(model)
        if export is None or export.is_checkpoint:
            refuse_unfinished(model)
            artifact = Artifact(model, bool(options.get("trust_remote_code", False)))
            plain = bool(static_prefix(artifact.config.get("quantization_config"))) and {"prefix": "calibrated"}
    return _loaded(model, {**options, "kv_cache": plain, "adapter": None, "scheme": None})


def _text(model: Model, text: str | Path, sequence_length: int | None, samples: int | None) -> EvaluationData:
    from pydantic import ValidationError

    from compress.data import load_evaluation
    from compress.recipe.models import EvaluateConfig
    from compress.recipe.origin import Origin

    if model.tokenizer is None:
        raise RequestError(f"{model.artifact.path} has no tokenizer, so it cannot be evaluated on text")
    context = model.engine.context_length
    length = sequence_length if sequence_length is not None else min(256, context or 256)
    if context is not None and length > context:
        raise RequestError(f"sequence length {length} is more than the model's context of {context}")
    try:
        config = EvaluateConfig(data=str(text), sequence_length=length, samples=samples)
    except ValidationError as error:
        problem = error.errors()[0]
        raise RequestError(f"{problem['loc'][0]}: {problem['msg']}, not {problem['input']!r}") from None
    config.locate(Origin(overrides={("evaluate", "data"): "text"}), ("evaluate",))
    return load_evaluation(config, model.tokenizer, model.engine.vocab_size)


def _check_same_tokens(model: Model, reference: Model) -> None:
    """KL between two models needs ids that mean the same. Vocabularies may differ in length (padding), not in content."""
    if model.tokenizer is None or reference.tokenizer is None:
        if model.engine.vocab_size != reference.engine.vocab_size:
            raise RequestError(
                f"the reference has {reference.engine.vocab_size} token ids and the model {model.engine.vocab_size}; "
                "a comparison needs the same tokenizer"
            )
        return
    ours, theirs = model.tokenizer.get_vocab(), reference.tokenizer.get_vocab()
    if ours != theirs:
        token = next(iter(dict(ours.items() ^ theirs.items())))
        raise RequestError(
            f"the reference {reference.artifact.path} has another tokenizer ({token!r} is {theirs.get(token, 'unknown')} there "
            f"and {ours.get(token, 'unknown')} here); a comparison needs the same one"
        )


def parameter_count(artifact: Artifact | Export, trust_remote_code: bool = False) -> int:
    """Weights of the model that `config.json` describes, uncompressed; tied ones counted once. Nothing is allocated."""
    from runtime.modeling.skeleton import build_skeleton, read_config

    skeleton = build_skeleton(read_config(artifact.path, trust_remote_code), torch.bfloat16, trust_remote_code)
    return sum(parameter.numel() for parameter in skeleton.parameters())


def sizes(model: Model, trust_remote_code: bool = False) -> dict[str, Any]:
    """`bytes` (all tensors on disk; of an export, its files), `bits_per_weight` (these over all weights), `weight_bytes` in memory."""
    from runtime.checkpoint.artifact import Artifact

    directory = model.artifact
    total = directory.checkpoint.total_bytes if isinstance(directory, Artifact) else model.engine.weight_bytes
    return {
        "bytes": total,
        "bits_per_weight": 8 * total / parameter_count(model.artifact, trust_remote_code),
        "weight_bytes": model.engine.weight_bytes,
    }
