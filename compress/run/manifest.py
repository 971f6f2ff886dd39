"""Manifest of an artifact, and the files around its shards."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from compress import report
from compress.core.files import listed, write_json, write_sealed, write_text, written_beside
from compress.core.loaded_bytes import loaded_bytes
from compress.core.run_directory import MANIFEST, UNHASHED, RunDirectory
from compress.model.checkpoint_writer import copy_companions, guarded, write_index
from compress.model.context import Context
from compress.model.stage import LayersJob, Readers
from compress.report.card import describe_source
from compress.run.session import recipe_digest
from runtime.checkpoint.artifact import SCHEMA_VERSION
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.guard import GUARDS, guards
from runtime.errors import ArtifactError
from runtime.system.lock import LOCK
from runtime.system.self_hash import KEY


def records(context: Context, directory: RunDirectory) -> list[dict[str, Any]]:
    """The records of all parts, in model order."""
    parts = [f"block-{index:05d}" for index in range(len(context.streamed.blocks))] + ["outside"]
    found = {part: directory.record(part) for part in parts}
    missing = [part for part, record in found.items() if record is None]
    if missing:
        raise ArtifactError(f"{directory.path}: the record of {missing[0]} is gone; run again without --resume")
    return [record for record in found.values() if record is not None]


def write_metadata(layers: LayersJob, directory: RunDirectory) -> None:
    """config.json, the shard index, the recipe as resolved, tokenizer and other companions."""
    context = layers.context
    done = records(context, directory)
    stored = [(name, record["shard"], size) for record in done for name, size in record["stored"].items()]
    recipe = yaml.safe_dump(context.recipe.resolved(), sort_keys=False, allow_unicode=True)
    write_text(directory.path / "recipe.yaml", recipe)
    copy_companions(context.checkpoint.path, directory.path)
    entries = {name: value for record in done for name, value in record["entries"].items()}
    config = layers.config(entries)
    tensors = guards(guarded(context.streamed, config, entries, {name for name, _, _ in stored}))
    if tensors:
        with written_beside(directory.path / GUARDS) as temporary:
            save_file(tensors, temporary, {"format": "pt"})
        known = {name for name, _, _ in stored}
        stored += [(name, GUARDS, 0) for name in tensors if name not in known]
    write_index(directory.path, stored)
    write_json(directory.path / "config.json", config)


def write_manifest(
    context: Context,
    directory: RunDirectory,
    identity: dict[str, Any],
    metrics: dict[str, Any],
    entries: Mapping[str, Any],
    files: Sequence[Path],
    readers: Readers | None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Account for every tensor and file, and write compress.json last of all.

    Args:
        entries: what stages of phase "artifact" say. files: what they have written into directories of their own.
        readers: who can read it. warnings: sentences on the texts.
    """
    done = records(context, directory)
    tensors = {name: entry for record in done for name, entry in record["tensors"].items()}
    for name, reason in context.streamed.checkpoint.dropped.items():
        tensors[name] = _dropped(context.checkpoint, name, reason)
    for name, stored in context.streamed.checkpoint.renamed.items():
        tensors[name]["source_name"] = stored
    _account_for_cuts(context, tensors)
    lost = sorted(set(context.checkpoint.names()) - set(tensors))
    if lost:
        raise ArtifactError(f"tensor {lost[0]} is neither compressed nor copied ({len(lost)} in all); this is a bug")
    nested = [*directory.path.glob("[0-9]*_*/config.json"), *files]
    found = [f for f in sorted([*directory.path.iterdir(), *nested]) if f.name not in (*UNHASHED, LOCK)]
    known = listed(directory.path, found)
    for record in done:
        if known.get(record["shard"], {}).get("sha256") != record["sha256"]:
            raise ArtifactError(f"{directory.path / record['shard']} changed on the disk after it was written")
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "compress_version": identity["compress_version"],
        "identity": identity,
        "toolchain": toolchain(),
        "source": {
            "path_or_id": context.recipe.model,
            "fingerprint": identity["source_fingerprint"],
            "bytes": context.original.total_bytes,
            **describe_source(context.original.path),
        },
        "calibration": _calibration(context, sorted({record.get("processes", 1) for record in done})),
        "evaluation": _evaluation(context),
        "recipe_sha256": recipe_digest(context.recipe),
        "tensors": tensors,
        "layers": [layer for record in done for layer in record["layers"]],
        "metrics": metrics,
        "files": known,
        "bytes": loaded_bytes(
            directory.path,
            entries,
            context.original.total_bytes,
            sum(entry["bytes_after"] for entry in tensors.values()),
        ),
    }
    if warnings:
        manifest["warnings"] = list(warnings)
    if context.records:
        manifest["passes"] = list(context.records)
    manifest |= entries
    if readers is not None:
        manifest["readable_by"] = readers(directory.path, entries)
    manifest[KEY] = write_sealed(directory.path / MANIFEST, manifest)
    report.write_report(directory.path)
    report.write_card(directory.path)
    return manifest


def _dropped(source: Checkpoint, name: str, reason: str) -> dict[str, Any]:
    size = source.nbytes(name)
    return {"action": "dropped", "stored_as": [], "bytes_before": size, "bytes_after": 0, "reason": reason}


def _account_for_cuts(context: Context, tensors: dict[str, Any]) -> None:
    """What stages before have cut out of tensors of the source, or removed whole."""
    if context.source is None:
        return
    source = context.reference.checkpoint
    for name in [*source.names(), *source.dropped]:
        if name not in tensors:
            tensors[name] = _dropped(source, name, source.dropped.get(name, "removed by an earlier stage"))
        elif source.nbytes(name) != tensors[name]["bytes_before"] and tensors[name]["bytes_before"]:
            tensors[name]["bytes_before"] = source.nbytes(name)
            tensors[name]["cut"] = list(source.shape(name))
            if tensors[name]["action"] == "copied":
                tensors[name].setdefault("reason", "made smaller by an earlier stage")


def _calibration(context: Context, processes: list[int]) -> dict[str, Any] | None:
    """`processes`: how many shared the text, of the parts of the model (a run may go on with another number)."""
    if not context.reads_text:
        return None
    data = context.calibration
    told = {name: getattr(data, name) for name in ("description", "kind", "rows", "tokens", "sha256", "warning")}
    # The order of sums depends on it, and so may the last bit of anything.
    return told if processes == [1] else told | {"processes": processes}


def _evaluation(context: Context) -> dict[str, Any] | None:
    data = context.evaluation
    if data is None:
        return None
    return {name: getattr(data, name) for name in ("description", "kind", "rows", "tokens", "sha256")}


def toolchain() -> dict[str, str]:
    """Versions that decide what bytes come out."""
    import safetensors
    import transformers

    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "safetensors": safetensors.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads()),
    }  # fmt: skip
