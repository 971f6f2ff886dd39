"""Command `compress inspect`: lists the tensors of an artifact from its headers and manifest, and checks its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compress.commands.options import JSON
from compress.commands.output import finish, print_table, show_policy, show_readers, size_row, stdout_reserved
from compress.core.units import decoding_speed, size
from runtime.errors import ArtifactError, CompressError

if TYPE_CHECKING:
    from runtime.checkpoint.artifact import Artifact


def inspect(
    artifact: str = typer.Argument(..., metavar="ARTIFACT", help="An artifact, or a plain Hugging Face checkpoint."),
    verify: bool = typer.Option(False, "--verify", help="Check the SHA-256 of every file; exit code 1 if one differs."),
    as_json: bool = JSON,
) -> None:
    """List every tensor with its format, bits, sparsity and bytes, without loading any.

    \b
    Examples:
      compress inspect out/llama_w4_sparse
      compress inspect out/llama_w4_sparse --verify --json
    """
    with stdout_reserved(as_json):
        from runtime.api.load import refuse_unfinished
        from runtime.checkpoint.artifact import MANIFEST, Artifact, shown
        from runtime.checkpoint.export_directory import find_export, verify_files

        # An artifact that fails its check is a failure (exit 1) of something that was asked for rightly, however the damage
        # shows itself: a truncated file cannot even be opened.
        damaged = verify and (Path(artifact) / MANIFEST).is_file()
        try:
            export = find_export(artifact) if verify else None
            damaged = damaged or export is not None
            refuse_unfinished(artifact)
            opened = Artifact(artifact)
            checked = verify_files(opened, export) if verify else None
        except ArtifactError as error:
            raise CompressError(str(error)) if damaged else error from None
        result = describe(opened)
    result["verified_files"] = checked
    with shown(opened.path):
        finish(result, as_json, _show)


def describe(artifact: Artifact) -> dict[str, Any]:
    """Summary of an artifact or checkpoint and a row for each of its tensors.

    Rows of an artifact are the tensors of its source: `name`, `action`, `format`, `bits`, `sparsity`, `bytes_before`, `bytes`,
    `stored_as`; rows of a plain checkpoint are its own: `name`, `dtype`, `shape`, `bytes`. `speed` is what the run record says.
    """
    from compress.core.run_directory import recorded_samples
    from runtime.checkpoint.artifact import shown

    rows = _accounted(artifact) if artifact.manifest is not None else _stored(artifact)
    with shown(artifact.path):
        found = artifact.summary() | {"tensors": list(rows), "tensor_count": len(artifact.checkpoint.names())}
        samples = None if artifact.manifest is None else recorded_samples(artifact.path)
        found["speed"] = (samples or {}).get("speed") or []
        return found | {"readable_by": (artifact.manifest or {}).get("readable_by") or _readers(artifact)}


def _readers(artifact: Artifact) -> list[dict[str, str]]:
    """Of a checkpoint, or of an artifact whose manifest does not say; nothing where transformers does not know the model."""
    from export.readers import readable_by

    try:
        return readable_by(artifact.path, artifact.manifest or {})
    except CompressError:
        return []


def _accounted(artifact: Artifact) -> Iterator[dict[str, Any]]:
    assert artifact.manifest is not None
    layers = {layer["name"]: layer for layer in artifact.manifest.get("layers") or []}
    for name, account in artifact.manifest["tensors"].items():
        layer = layers.get(name.removesuffix(".weight"), {}) if account["action"] == "compressed" else {}
        stored = account.get("stored_as") or []
        dtype = str(artifact.checkpoint.dtype(stored[0])).removeprefix("torch.") if len(stored) == 1 else None
        yield {
            "name": name,
            "action": account["action"],
            "format": account.get("format") or dtype,
            "bits": layer.get("bits"),
            "sparsity": layer.get("sparsity"),
            "error": layer.get("error"),
            "bytes_before": account.get("bytes_before", 0),
            "bytes": sum(artifact.checkpoint.nbytes(tensor) for tensor in stored),
            "stored_as": stored,
            **({"reason": account["reason"]} if account.get("reason") else {}),
        }


def _stored(artifact: Artifact) -> Iterator[dict[str, Any]]:
    checkpoint = artifact.checkpoint
    for name in checkpoint.names():
        yield {
            "name": name,
            "dtype": str(checkpoint.dtype(name)).removeprefix("torch."),
            "shape": list(checkpoint.shape(name)),
            "bytes": checkpoint.nbytes(name),
        }


def _show(result: dict[str, Any]) -> None:
    from compress.evaluate.metrics import Quality
    from compress.evaluate.texts import describe as describe_texts
    from compress.model.stage import row_of

    tensors = result["tensors"]
    if "schema_version" in result:
        rows: list[tuple[str, ...]] = [
            (
                row["name"], row["action"], row["format"] or "", f"{row['bits']:.2f}" if row["bits"] else "",
                f"{row['sparsity']:.1%}" if row["sparsity"] else "", size(row["bytes_before"]), size(row["bytes"]),
            )
            for row in tensors
        ]  # fmt: skip
        print_table(("tensor", "action", "format", "bits", "sparsity", "before", "bytes"), rows, right=(3, 4, 5, 6))
    else:
        rows = [(row["name"], row["dtype"], "×".join(map(str, row["shape"])), size(row["bytes"])) for row in tensors]
        print_table(("tensor", "dtype", "shape", "bytes"), rows, right=(3,))
    print(f"{result['architecture']} in {result['path']}")
    print(f"{result['tensor_count']} tensors, {size(result['tensor_bytes'])}, in {result['files']} safetensors files")
    if result.get("quant_method"):
        print(f"Compressed: quant_method {result['quant_method']}, format {result['format']}")
    if result.get("source"):
        what, before, after, note = size_row(result["bytes"])
        print(f"Made by compress {result['compress_version']} from {result['source']['path_or_id']}")
        print(f"{what[0].upper()}{what[1:]}: {before} -> {after}, {note}")
    if speed := decoding_speed(result["speed"]):
        print(speed)
    show_readers(result["readable_by"])
    lines = [(f"Pass: {label}", *row) for label, *row in map(row_of, result.get("passes") or [])]
    metrics = result.get("metrics") or {}
    if result.get("kv_cache"):
        show_policy(result["kv_cache"], result.get("kv_cache_bytes") or [], metrics)
    for label, before, after, note in [*lines, *Quality.of(metrics).rows()]:
        change = f"{before} -> {after}" if before else after
        print("; ".join(part for part in (f"{label} {change}".strip(), note) if part))
    if "reason" in metrics:
        print(metrics["reason"])
    if told := describe_texts(result.get("calibration"), result.get("evaluation")):
        print(f"{told}.")
    for text in result.get("warnings") or []:
        print(f"Warning: {text}")
    if result["verified_files"] is not None:
        print(f"Verified: all {result['verified_files']} files match their SHA-256.")
