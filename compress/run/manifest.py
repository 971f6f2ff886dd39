"""After the last block: the files around the shards, the numbers, and the manifest that makes the directory an artifact."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from compress import data as calibration
from compress.core.files import sha256, write_json, write_text
from compress.core.progress import Reporter
from compress.core.run_directory import MANIFEST, UNHASHED, WORK, RunDirectory
from compress.evaluate.streamed import REASON, compare, compare_embeddings, compare_texts
from compress.evaluate.through_cache import LEAST
from compress.kv_cache.stage import cache_facts
from compress.model.checkpoint_writer import copy_companions
from compress.model.streamed import StreamedModel
from compress.run.pass_records import facts
from compress.run.session import Session
from compress.weights.compatibility import foreign_layers
from runtime.checkpoint.artifact import SCHEMA_VERSION
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import build, entry_from_dict
from runtime.system.lock import LOCK
from runtime.system.self_hash import KEY, sealed_json

if TYPE_CHECKING:
    from runtime.kv_cache.policy.policy import Policy


def evaluation_windows(session: Session) -> torch.Tensor | None:
    """Held-out ids `[n, s]` of the recipe's `evaluate`, or None when it asks for no evaluation.

    Raises:
        RequestError: a text that cannot be used, windows too short to measure the recipe's cache on, or a limit on what cannot be measured.
    """
    config = session.recipe.evaluate
    if config is None:
        return None
    if session.cache_policy is not None and config.sequence_length < LEAST:
        raise RequestError(config.at("sequence_length", f"a kv_cache stage needs windows of at least {LEAST} tokens"))
    if session.cut_tokens and session.streamed.kind != "encoder":
        for name in ("max_kl", "min_top1_agreement"):
            if getattr(config, name) is not None:
                raise RequestError(config.at(name, f"{REASON}; set max_perplexity_increase in its place"))
        return _same_text(session)[1].ids
    if session.speech is not None:
        return calibration.load_speech_evaluation(config, session.speech)
    return session.framed(calibration.load_evaluation(config, session.tokenizer, session.vocabulary))


def _same_text(session: Session) -> tuple[calibration.Spans, calibration.Spans]:
    """The evaluation text in the tokens of the recipe's model, and as much of it in those that are left of them."""
    config = session.recipe.evaluate
    assert config is not None
    theirs = calibration.evaluation_spans(config, session.source_tokenizer, session.source_vocabulary)
    characters = int(theirs.characters.sum())
    return theirs, calibration.evaluation_spans(config, session.tokenizer, session.vocabulary, characters)


def parts(session: Session) -> list[str]:
    return [f"block-{index:05d}" for index in range(len(session.streamed.blocks))] + ["outside"]


def records(session: Session, directory: RunDirectory) -> list[dict[str, Any]]:
    """The records of all parts, in model order."""
    found = [directory.record(part) for part in parts(session)]
    missing = [part for part, record in zip(parts(session), found, strict=True) if record is None]
    if missing:
        raise ArtifactError(f"{directory.path}: the record of {missing[0]} is gone; run again without --resume")
    return [record for record in found if record is not None]


def write_metadata(session: Session, directory: RunDirectory) -> None:
    """config.json, the shard index, the recipe as resolved, tokenizer and other companions."""
    done = records(session, directory)
    entries = {name: entry_from_dict(value) for record in done for name, value in record["entries"].items()}
    config = dict(session.checkpoint.config)
    if entries:
        name = session.streamed.checkpoint.published_module
        model, pieces = session.streamed.model, session.streamed.checkpoint.pieces
        foreign = {name(module) for module in foreign_layers(model, entries, pieces)}
        entries = {name(module): entry for module, entry in entries.items()}
        # Classes of models among them that do more than multiply (routers): as "Linear" compressed-tensors would mean them too.
        linear = {name(n): n for n, module in model.named_modules() if isinstance(module, nn.Linear)}
        # Matrices that the model has no place for: an engine that has one must not look for compressed weights there.
        source = session.checkpoint
        extra = [n.removesuffix(".weight") for n in session.streamed.extra if n.endswith(".weight")]
        linear |= {module: module for module in extra if len(source.shape(f"{module}.weight")) == 2}
        # Routers are no linear layers in transformers, and are in other engines.
        linear |= {name(module): module for module in _other_matrices(session) if name(module) not in entries}
        config["quantization_config"] = build(entries, linear, foreign, also=linear)
    if session.untie:
        config["tie_word_embeddings"] = False
    weight_map = {name: record["shard"] for record in done for name in record["stored"]}
    index = {
        "metadata": {"total_size": sum(size for record in done for size in record["stored"].values())},
        "weight_map": weight_map,
    }
    write_json(directory.path / "model.safetensors.index.json", index)
    write_text(
        directory.path / "recipe.yaml", yaml.safe_dump(session.recipe.resolved(), sort_keys=False, allow_unicode=True)
    )
    copy_companions(session.checkpoint.path, directory.path)
    write_json(directory.path / "config.json", config)


def _other_matrices(session: Session) -> list[str]:
    """Modules with a matrix for a weight that are neither linear layers nor embeddings."""
    return [
        name
        for name, module in session.streamed.model.named_modules()
        if not isinstance(module, (nn.Linear, nn.Embedding))
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.dim() == 2
    ]


def evaluate(
    session: Session,
    artifact: StreamedModel,
    windows: torch.Tensor | None,
    directory: RunDirectory,
    spill: bool,
    reporter: Reporter,
) -> dict[str, Any]:
    """Quality before and after, and how it stands to the recipe's limits. Empty without `evaluate` in the recipe."""
    config = session.recipe.evaluate
    if config is None or windows is None:
        return {}
    if not session.checkpoint_is_finite:
        reporter.warn("the source holds NaN or Inf, so its quality was not measured")
        return {}
    source, work = session.reference, directory.work if spill else None
    if session.streamed.kind == "encoder":
        given = session.source_ids(windows) if session.cut_tokens else None
        metrics = compare_embeddings(source, artifact, windows, config.batch_size, work, reporter, given)
    elif session.cut_tokens:
        metrics = compare_texts(source, artifact, *_same_text(session), config.batch_size, work, reporter)
    else:
        metrics = compare(source, artifact, windows, config.batch_size, work, reporter)
    if "after" in metrics:
        metrics["perplexity_increase"] = metrics["after"]["perplexity"] / metrics["before"]["perplexity"] - 1.0
    metrics["sequence_length"] = session.streamed.rows.length(windows)
    metrics["limits"] = check_limits(metrics, config.limits())
    return metrics


def check_limits(metrics: dict[str, Any], limits: dict[str, float]) -> list[dict[str, Any]]:
    """[{"name", "limit", "value", "ok"}] of the limits on something that was measured; NaN fails every limit."""
    if "cosine" in metrics:
        values = {"min_cosine": metrics["cosine"]["mean"]}
    else:
        values = {
            "max_perplexity": metrics["after"]["perplexity"], "max_perplexity_increase": metrics["perplexity_increase"],
            **({"max_kl": metrics["kl"], "min_top1_agreement": metrics["top1_agreement"]} if "kl" in metrics else {}),
        }  # fmt: skip
    return held_to(values, limits)


def held_to(values: dict[str, float], limits: dict[str, float]) -> list[dict[str, Any]]:
    """[{"name", "limit", "value", "ok"}] of the limits on one of `values`: those named min_ are the least allowed, others the most."""
    return [
        {
            "name": name,
            "limit": limit,
            "value": values[name],
            "ok": bool(values[name] >= limit if name.startswith("min_") else values[name] <= limit),
        }
        for name, limit in sorted(limits.items())
        if name in values
    ]


def write_manifest(
    session: Session,
    directory: RunDirectory,
    identity: dict[str, Any],
    metrics: dict[str, Any],
    policy: Policy | None = None,
    draft: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Account for every tensor and file, say how keys and values are held and what drafts, and write compress.json last of all."""
    done = records(session, directory)
    tensors = {name: entry for record in done for name, entry in record["tensors"].items()}
    for name, reason in session.streamed.checkpoint.dropped.items():
        size = session.checkpoint.nbytes(name)
        tensors[name] = {"action": "dropped", "stored_as": [], "bytes_before": size, "bytes_after": 0, "reason": reason}
    for name, stored in session.streamed.checkpoint.renamed.items():
        tensors[name]["source_name"] = stored
    _account_for_cuts(session, tensors)
    lost = sorted(set(session.checkpoint.names()) - set(tensors))
    if lost:
        raise ArtifactError(
            f"tensor {lost[0]} of the source is neither compressed nor copied ({len(lost)} in all); this is a bug"
        )
    nested = [*directory.path.glob("[0-9]*_*/config.json"), *draft_files(directory.path, draft)]
    hashed = [
        f for f in sorted([*directory.path.iterdir(), *nested]) if f.is_file() and f.name not in (*UNHASHED, LOCK)
    ]
    files = listed(directory.path, hashed)
    for record in done:
        if files.get(record["shard"], {}).get("sha256") != record["sha256"]:
            raise ArtifactError(f"{directory.path / record['shard']} changed on the disk after it was written")
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "compress_version": identity["compress_version"],
        "identity": identity,
        "toolchain": toolchain(),
        "source": {
            "path_or_id": session.recipe.model,
            "fingerprint": identity["source_fingerprint"],
            "bytes": session.original.total_bytes,
        },
        "calibration": _calibration(session, sorted({record.get("processes", 1) for record in done})),
        "recipe_sha256": session.recipe_digest(draft=True),
        "tensors": tensors,
        "layers": [layer for record in done for layer in record["layers"]],
        "metrics": metrics,
        "files": files,
        "bytes": {
            "before": session.original.total_bytes,
            "after": sum(entry["bytes_after"] for entry in tensors.values()),
        },
    }
    made = facts(directory, session)
    if made:
        manifest["passes"] = made
    cache = cache_facts(session, policy)
    if policy is not None and cache is not None:
        manifest |= {"kv_cache": policy.resolved(), "kv_cache_bytes": cache["bytes"]}
    if draft is not None:
        manifest["draft"] = draft
    manifest[KEY] = write_sealed(directory.path / MANIFEST, manifest)
    from compress.report import write_report

    write_report(directory.path)
    return manifest


def write_sealed(file: Path, manifest: dict[str, Any]) -> str:
    """Write a manifest with a digest of itself, and return that."""
    text = sealed_json(manifest)
    write_text(file, text)
    digest: str = json.loads(text)[KEY]
    return digest


def _account_for_cuts(session: Session, tensors: dict[str, Any]) -> None:
    """What stages before have cut out of tensors of the source, or removed whole."""
    if session.source is None:
        return
    source = session.reference.checkpoint
    for name in [*source.names(), *source.dropped]:
        if name not in tensors:
            reason = source.dropped.get(name, "removed by an earlier stage")
            tensors[name] = {
                "action": "dropped", "stored_as": [], "bytes_before": source.nbytes(name), "bytes_after": 0, "reason": reason,
            }  # fmt: skip
        elif source.nbytes(name) != tensors[name]["bytes_before"] and tensors[name]["bytes_before"]:
            tensors[name]["bytes_before"] = source.nbytes(name)
            tensors[name]["cut"] = list(source.shape(name))
            if tensors[name]["action"] == "copied":
                tensors[name].setdefault("reason", "made smaller by an earlier stage")


def draft_files(path: Path, draft: dict[str, Any] | None) -> list[Path]:
    """All files of the draft of the artifact at `path`, by what the manifest says of it."""
    place = None if draft is None else draft["drafter"].get("model")
    return [] if place is None else sorted(f for f in (path / place).iterdir() if f.is_file())


def listed(path: Path, files: list[Path]) -> dict[str, dict[str, Any]]:
    """The manifest's account of files below `path`."""
    return {f.relative_to(path).as_posix(): {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files}


def _calibration(session: Session, processes: list[int]) -> dict[str, Any] | None:
    """`processes`: how many shared the text, of the parts of the model (a run may go on with another number)."""
    if not session.reads_text:
        return None
    data = session.calibration
    return {
        "description": data.description,
        "rows": data.rows,
        "tokens": data.tokens,
        "sha256": data.sha256,
        "warning": data.warning,
        # The order of sums depends on it, and so may the last bit of anything.
        **({"processes": processes} if processes != [1] else {}),
    }


def toolchain() -> dict[str, str]:
    """Versions that decide what bytes come out."""
    import safetensors
    import transformers

    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "safetensors": safetensors.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads()),
    }  # fmt: skip


def read_manifest(directory: RunDirectory) -> dict[str, Any]:
    return json.loads((directory.path / MANIFEST).read_text(encoding="utf-8"))


__all__ = ["WORK", "evaluate", "evaluation_windows", "read_manifest", "write_manifest", "write_metadata"]
