"""Command `compress export`: writes an artifact for another engine and verifies it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compress.commands.load_options import TRUST
from compress.commands.output import duration, print_json, print_table, size, stdout_reserved
from runtime.errors import RequestError

if TYPE_CHECKING:
    from export.run import Exported


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export")(export)


def export(
    artifact: str | None = typer.Argument(
        None, metavar="[ARTIFACT]", help="An artifact (default: the last one that `apply` wrote from this directory)."
    ),
    target: str | None = typer.Option(None, "--target", "-t", help="Target to write; see --list."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Output directory (default: ARTIFACT-TARGET, beside the artifact)."
    ),
    list_: bool = typer.Option(
        False, "--list", help="List the targets that fit the artifact, and why the others do not."
    ),
    set_: list[str] = typer.Option(
        [], "--set", help="OPTION=VALUE of the target, such as dtype=float16; repeatable (--list names the options)."
    ),
    ort: bool | None = typer.Option(
        None, "--ort", help="onnx: ONNX Runtime's own operators (MatMulNBits, GroupQueryAttention)."
    ),
    layout: str | None = typer.Option(None, "--layout", help="huggingface: compressed-tensors or gptq."),
    bundle: bool | None = typer.Option(None, "--bundle", help="tensorrt: write the build bundle instead of an engine."),
    require_engine: bool | None = typer.Option(
        None, "--require-engine", help="tensorrt: fail (exit code 2) if no engine can be built."
    ),
    requantize: bool | None = typer.Option(
        None, "--requantize", help="Requantize weights whose grid the target cannot hold, and report the loss."
    ),
    verify: bool = typer.Option(
        True, "--verify/--no-verify", help="Load the export back and compare it with the artifact."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier export in the output directory."),
    trust_remote_code: bool = TRUST,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No progress on stderr."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object on stdout and nothing else there."),
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
    if as_json:
        print_json({"artifact": str(artifact), **_result(result)})
    else:
        _show(artifact, result)


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
        found = fitting(artifact, trust_remote_code)
    if as_json:
        targets = {
            name: {"fits": reason is None, "reason": reason, "options": sorted(get(name).options.model_fields)}
            for name, reason in found.items()
        }
        print_json({"artifact": artifact, "targets": targets})
        return
    rows = [
        (
            name,
            "fits" if reason is None else "no",
            reason or get(name).summary,
            ", ".join(get(name).options.model_fields),
        )
        for name, reason in found.items()
    ]
    print_table(f"Targets for {artifact}", ("target", "", "", "options"), rows)


def _result(result: Exported) -> dict[str, Any]:
    return {
        "path": str(result.path),
        "target": result.target,
        "bytes": result.bytes,
        "conversions": [
            {"what": c.what, "modules": list(c.modules), "exact": c.exact, "bytes": c.bytes} for c in result.conversions
        ],
        "losses": result.losses,
        "verification": None if result.verification is None else result.verification.as_dict(),
        "facts": result.facts,
        "warnings": result.warnings,
        "seconds": result.seconds,
    }


def _show(artifact: str, result: Exported) -> None:
    found = result.verification
    if found is None:
        print("Not verified (--no-verify).")
    else:
        print(f"Loaded back with {found.loader}: {found.checked}.")
        print_table(
            "", ("", ""), [(k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in found.metrics.items()], right=(1,)
        )
    for line in result.facts.get("say", []):
        print(line)
    # The artifact is named here too: with --quiet and none on the command line, nothing else would say which one it was.
    print(
        f"{artifact} written to {result.path}: {size(result.bytes)} in {duration(result.seconds)}. "
        "Its README.md shows how to run it."
    )
