"""Command `compress export`: writes an artifact for another engine and verifies it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from compress.commands.options import JSON, QUIET, TRUST
from compress.commands.output import finish, print_table, stdout_reserved
from compress.core.units import duration, size
from runtime.errors import RequestError


def export(
    artifact: str | None = typer.Argument(None, help="An artifact (default: the last that `apply` wrote from here)."),
    target: str | None = typer.Option(None, "--target", "-t", help="Target to write; see --list."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Output directory (default: ARTIFACT-TARGET)."),
    list_: bool = typer.Option(False, "--list", help="List the targets, their options, and whether they fit."),
    set_: list[str] = typer.Option([], "--set", help="OPTION=VALUE of the target, as in dtype=float16; repeatable."),
    ort: bool | None = typer.Option(None, "--ort", help="onnx: use ONNX Runtime's own operators, such as MatMulNBits."),
    layout: str | None = typer.Option(None, "--layout", help="huggingface: compressed-tensors or gptq."),
    bundle: bool | None = typer.Option(None, "--bundle", help="tensorrt: write the build bundle instead of an engine."),
    require_engine: bool | None = typer.Option(None, "--require-engine", help="tensorrt: fail if no engine is built."),
    requantize: bool | None = typer.Option(None, "--requantize", help="Requantize weights the target cannot hold."),
    verify: bool = typer.Option(True, "--verify/--no-verify", help="Load the export back and compare it."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier export in the output directory."),
    trust_remote_code: bool = TRUST,
    quiet: bool = QUIET,
    as_json: bool = JSON,
) -> None:
    """Export an artifact to another engine, load the result back and compare it with the artifact.

    \b
    Examples:
      compress export out/llama_w4 --list
      compress export out/llama_w4 --target onnx
      compress export --target tensorrt --output engines/llama
      compress export out/llama_w4 --target onnx --ort --set dtype=float16
    """
    from compress.core.last_artifact import last_artifact

    if artifact is None:
        artifact = last_artifact()
        if not as_json and not quiet:
            typer.echo(f"Artifact: {artifact}, the last one that `compress apply` wrote from this directory.", err=True)
    if list_:
        _list(artifact, trust_remote_code, as_json)
        return
    if target is None:
        from export.targets import names

        raise RequestError(f"--target is missing; give one of {', '.join(names())} (--list shows which fit)")
    flags = {"ort": ort, "layout": layout, "bundle": bundle, "require_engine": require_engine, "requantize": requantize}
    options = _assignments(set_) | {name: value for name, value in flags.items() if value is not None}
    import export as package

    with stdout_reserved(as_json):
        result = package.export(
            artifact, target, output, verify=verify, overwrite=overwrite, quiet=quiet or as_json,
            trust_remote_code=trust_remote_code, **options,
        )  # fmt: skip
    finish({"artifact": artifact, **asdict(result)}, as_json, _show)


def _assignments(given: list[str]) -> dict[str, Any]:
    """`name=value` pairs, values read as YAML."""
    import yaml

    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise RequestError(f"--set {text!r} must be OPTION=VALUE, such as dtype=float16")
        try:
            options[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise RequestError(f"--set {text!r}: the value is not valid YAML") from error
    return options


def _list(artifact: str, trust_remote_code: bool, as_json: bool) -> None:
    from export import fitting
    from export.targets import get

    with stdout_reserved(as_json):
        targets = {
            name: {"fits": reason is None, "reason": reason, "options": sorted(get(name).options.model_fields)}
            for name, reason in fitting(artifact, trust_remote_code).items()
        }
    finish({"artifact": artifact, "targets": targets}, as_json, _show_targets)


def _show_targets(result: dict[str, Any]) -> None:
    from export.targets import get

    rows = [
        (name, "yes" if found["fits"] else "no", found["reason"] or get(name).summary, ", ".join(found["options"]))
        for name, found in result["targets"].items()
    ]
    print(f"Targets for {result['artifact']}:")
    print_table(("target", "fits", "", "options"), rows)


def _show(result: dict[str, Any]) -> None:
    found = result["verification"]
    if found is None:
        print("Not verified (--no-verify).")
    else:
        print(f"Loaded back with {found['loader']}: {found['checked']}.")
        rows = [(key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in found["metrics"].items()]
        print_table(("", ""), rows, right=(1,))
    for line in result["facts"].get("say", []):
        print(line)
    # The artifact is named here too: with --quiet and none on the command line, nothing else would say which one it was.
    written = f"{size(result['bytes'])} in {duration(result['seconds'])}"
    print(f"{result['artifact']} written to {result['path']}: {written}. Its README.md shows how to run it.")
