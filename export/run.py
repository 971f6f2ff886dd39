"""One export from beginning to end: check, write beside, load back, compare, rename."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from export import targets
from export.folder import beside, check_output, check_space, listing, write_json
from export.source import Source
from export.target import Conversion, Job, Target, Verification
from runtime.checkpoint.export_directory import FORMAT, MANIFEST, README, SCHEMA_VERSION
from runtime.checkpoint.locate import resolve
from runtime.errors import RequestError
from runtime.system.progress import ProgressReporter
from runtime.system.self_hash import sealed_json

# Packages whose version an export may depend on; only those that are installed are recorded.
_TOOLS = (
    "compress", "torch", "transformers", "safetensors", "onnx", "onnxscript", "onnxruntime", "gguf", "llama_cpp_python", "tensorrt",
    "triton", "compressed-tensors", "gptqmodel",
)  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        path: the directory.
        target: its target's name.
        bytes: of all files.
        conversions: what is stored in another way than in the artifact.
        losses: {module: relative error} of weights that were rounded anew.
        verification: what loading it back showed; None when that was not wanted.
        facts: what the target says of itself.
        warnings, seconds: of this run.
    """

    path: Path
    target: str
    bytes: int
    conversions: list[Conversion]
    losses: dict[str, float]
    verification: Verification | None
    facts: dict[str, Any]
    warnings: list[str]
    seconds: float


def run(
    artifact: str | Path,
    target: str,
    output: str | Path | None,
    verify: bool,
    overwrite: bool,
    quiet: bool,
    trust_remote_code: bool,
    options: dict[str, Any],
) -> Exported:
    """See `export.export`."""
    start = time.monotonic()
    chosen = targets.get(target)
    resolve(artifact, trust_remote_code)  # says what is wrong with the path before targets look into it
    source = chosen.open(artifact, trust_remote_code)
    settings = parse_options(chosen, {**source.defaults, **options})
    place = Path(output) if output is not None else default_output(source.path, target)
    check_output(place, source.path, overwrite)
    source.verify()  # an export of a damaged artifact would pass every later check
    reason = chosen.reason_against(source, settings)
    if reason is not None:
        raise RequestError(f"target {target} cannot hold {source.path}: {reason}")
    chosen.require_packages()
    conversions = chosen.conversions(source, settings)
    check_space(place, chosen.bytes_needed(source, settings))
    with ProgressReporter(quiet) as progress, beside(place) as folder:
        for conversion in conversions:
            progress.info(f"  {conversion.sentence()}")
        behind = left_behind(chosen, source)
        if behind is not None:
            progress.warn(behind)
        job = Job(source, settings, folder, progress, output=place)
        chosen.write(job)
        if job.losses:
            worst = max(job.losses, key=lambda name: job.losses[name])
            progress.warn(
                f"{len(job.losses)} layers were rounded anew; the largest relative error is {job.losses[worst]:.4f} ({worst})"
            )
        manifest = {
            "format": FORMAT,  # first, where a reader finds it even if the rest is damaged
            "schema_version": SCHEMA_VERSION,
            "target": target,
            "options": settings.model_dump(mode="json"),
            "artifact": source.describe(),
            "tools": tool_versions(),
            "conversions": [asdict(conversion) for conversion in conversions],
            "left_behind": behind,
            "losses": job.losses,
            target: job.facts,
            "files": {},
        }
        write_json(folder / MANIFEST, manifest)  # `verify` loads the folder as users will; the listing follows
        verification = chosen.verify(job) if verify else None
        for note in verification.notes if verification else ():
            progress.warn(note)
        (folder / README).write_text(_readme(chosen, job, conversions, verification, behind), encoding="utf-8")
        (folder / MANIFEST).unlink()
        files = listing(folder)
        manifest |= {
            "verification": None if verification is None else verification.as_dict(),
            "warnings": progress.warnings,
            target: job.facts,
            "files": files,
        }
        text = sealed_json(manifest, sort_keys=False, default=str)
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    return Exported(
        place, target, sum(file["bytes"] for file in files.values()), conversions, job.losses, verification, job.facts,
        progress.warnings, time.monotonic() - start,
    )  # fmt: skip


def left_behind(target: Target, source: Any) -> str | None:
    """What of the artifact the target does not write, in a sentence; None: nothing. (A build bundle is no artifact any more.)"""
    manifest = source.artifact.manifest if isinstance(source, Source) else None
    policy = (manifest or {}).get("kv_cache")
    if policy is None or target.keeps_cache:
        return None
    from runtime.kv_cache.policy.policy import Policy

    described = Policy.parse(policy).describe()
    what = f"the artifact's KV-cache policy ({described}) stays behind"
    return f"{what}: what target {target.name} writes cannot hold one"


def parse_options(target: Target, given: dict[str, Any]) -> Any:
    """The target's options; RequestError names what is wrong and which targets know the option."""
    try:
        return target.options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "options"
        if first["type"] == "extra_forbidden":
            homes = [n for n in targets.names() if name in targets.get(n).options.model_fields]
            known = f"it belongs to {', '.join(homes)}" if homes else f"known: {', '.join(target.options.model_fields)}"
            raise RequestError(f"target {target.name} has no option {name}; {known}") from error
        raise RequestError(f"option {name} of target {target.name}: {first['msg']}, not {first['input']!r}") from error


def default_output(artifact: Path, target: str) -> Path:
    """`<artifact>-<target>`, beside the artifact."""
    path = Path(os.path.abspath(artifact))  # a link keeps its name, ".." does not
    return path.with_name(f"{path.name}-{target}")


def fitting(artifact: str | Path, trust_remote_code: bool = False) -> dict[str, str | None]:
    """See `export.fitting`. What is not installed counts as a reason too."""
    source = Source(artifact, trust_remote_code)
    result: dict[str, str | None] = {}
    for name in targets.names():
        target = targets.get(name)
        reason = target.reason_against(source, target.options())
        if reason is None:
            try:
                target.require_packages()
            except RequestError as error:
                reason = str(error).removeprefix(f"target {name} ")
        result[name] = reason
    return result


def tool_versions() -> dict[str, str]:
    """{package: version} of what took part, and Python's."""
    result = {"python": platform.python_version()}
    for name in _TOOLS:
        with suppress(PackageNotFoundError):
            result[name] = version(name)
    return result


def _readme(target: Target, job: Job, changes: list[Conversion], found: Verification | None, behind: str | None) -> str:
    name = job.output.name
    intro = f"{target.summary} Made by compress from `{job.source.path.name}`."
    lines = [f"# {name}", "", intro, "", "```python", *target.usage(job, name), "```", ""]
    if changes:
        lines += ["Stored in another way than in the artifact:", ""]
        lines += [f"- {change.sentence()}" for change in changes] + [""]
    if behind is not None:
        lines += [f"{behind[0].upper()}{behind[1:]}.", ""]
    if found is None:
        lines += ["Not verified: the export was not loaded back.", ""]
    else:
        metrics = ", ".join(f"{key} {_short(value)}" for key, value in found.metrics.items())
        lines += [f"Loaded back with {found.loader}: {found.checked} ({metrics}).", ""]
        lines += [f"- {note}" for note in found.notes] + [""] * bool(found.notes)
    lines.append("`export.json` has the artifact's hash, tool versions, every conversion and every file's SHA-256.")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
