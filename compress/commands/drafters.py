"""`compress bench --drafters`: which drafter makes an artifact fastest here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.commands.output import print_json, print_table, stdout_reserved


def compare_drafters(
    model: str,
    options: dict[str, Any],
    text: str | None,
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
        new_tokens, batch_size, repeat: of each measurement.
        save: write the choice into the artifact.
        as_json: one JSON object on stdout.
    """
    from compress.evaluate.drafters import compare, save_choice

    with stdout_reserved(as_json):
        result = compare(model, options, None if text is None else Path(text), new_tokens, batch_size, repeat)
        if save:
            result["saved"] = str(save_choice(Path(result["path"]), result))
    if as_json:
        print_json(result)
        return
    kinds = result["kinds"]
    rows = []
    for entry in result["drafters"]:
        speeds = [f"{entry['speedup'][kind]:.2f}x" if entry.get("speedup") else "" for kind in kinds]
        accepted = "" if entry["mean_accepted"] is None else f"{entry['mean_accepted']:.2f}"
        rows.append((entry["name"], *speeds, f"{entry['overall']:.2f}x", accepted))
    print_table("", ("drafter", *kinds, "over all", "accepted a draft"), rows, right=tuple(range(1, len(kinds) + 3)))
    print(
        f"Times faster than plain decoding: {result['prompts']} prompts, {new_tokens} new tokens each, {batch_size} at a time."
    )
    print(f"Best: {result['best']}" + (f"; kept in {result['saved']}, which runtime.load reads" if save else ""))
