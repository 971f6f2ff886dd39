"""`compress bench --drafters`: which drafter makes an artifact fastest here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.commands.output import print_json, print_table, stdout_reserved


def compare_drafters(
    model: str,
    options: dict[str, Any],
    text: str | None,
    prompt_tokens: int | None,
    new_tokens: int,
    batch_size: int,
    repeat: int,
    save: bool,
    as_json: bool,
) -> None:
    """Measure, show, and keep the best.

    Args:
        model: artifact or checkpoint.
        options: keywords of `runtime.load`.
        text: file that prompts are cut out of.
        prompt_tokens, new_tokens, batch_size, repeat: of each measurement.
        save: write the choice into the artifact.
        as_json: one JSON object on stdout.
    """
    from compress.evaluate.drafters import compare

    with stdout_reserved(as_json):
        file = None if text is None else Path(text)
        result = compare(model, options, file, new_tokens, batch_size, repeat, prompt_tokens)
        if save:
            result["saved"] = str(_save(result, options.get("device", "auto")))
    if as_json:
        print_json(result)
        return
    kinds = result["kinds"]
    rows = []
    for entry in result["drafters"]:
        speeds = [f"{entry['speedup'][kind]:.2f}x" if entry.get("speedup") else "" for kind in kinds]
        accepted = "nothing drafted" if entry["mean_accepted"] is None else f"{entry['mean_accepted']:.2f}"
        rows.append((entry["name"], *speeds, f"{entry['overall']:.2f}x", accepted))
    print_table("", ("drafter", *kinds, "over all", "accepted of a draft"), rows, right=tuple(range(1, len(kinds) + 3)))
    print(
        f"Times faster than plain decoding: {result['prompts']} prompts, {new_tokens} new tokens each, {batch_size} at a time."
    )
    for name, reason in result["skipped"].items():
        print(f"{name} does not fit: {reason}")
    print(f"Best: {result['best']}" + (f"; kept in {result['saved']}, which runtime.load reads" if save else ""))


def _save(result: dict[str, Any], device: Any) -> Path:
    """Keep the best for the directory and this machine, with what was measured."""
    from runtime.artifact import Artifact
    from runtime.decoding.drafters.choice import write_choice
    from runtime.loading import read_device

    artifact = Artifact(result["path"])
    measured = [{key: entry[key] for key in ("name", "speedup", "overall")} for entry in result["drafters"]]
    return write_choice(artifact.path, result["drafter"], artifact, read_device(device), measured)
