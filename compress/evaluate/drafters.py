"""Drafters beside plain decoding, on the same prompts in turn, and the choice of the best for an artifact on this machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.artifact import Artifact
from runtime.errors import RequestError

PROMPT = 64  # tokens
_GAIN = 1.02  # a drafter must be so much faster than none to be chosen
_MOST_PROMPTS = 8  # of a kind


def compare(
    model: str, options: Mapping[str, Any], text: Path | None, new_tokens: int, batch_size: int, repeat: int
) -> dict[str, Any]:
    """Load a model once and decode its prompts with each drafter that fits it, round after round, plain decoding in each round.

    Args:
        model: an artifact or a checkpoint.
        options: keywords of `runtime.load`.
        text: prompts are cut out of it; None: samples of prose, code and chat, and code to be written again.
        new_tokens: of a prompt.
        batch_size: prompts at once.
        repeat: rounds after one in which drafters learn and costs are found.

    Returns:
        "drafters": [{"name", "drafter" (what `runtime.load` takes), "speedup": {kind: median ratio}, "overall": geometric mean,
        "mean_accepted", "acceptance_rate"}], best first; "best", "kinds", "prompts", "path".

    Raises:
        RequestError: the model verifies no drafts, or has no tokenizer while no text is tokenized for it.
    """
    import runtime
    from runtime.decoding.drafters.choose import Target, choose_speculation, why_not
    from runtime.model import Model

    loaded = runtime.load(model, **{**options, "drafter": False})
    if not isinstance(loaded, Model):
        raise RequestError(f"{model} holds a {type(loaded).__name__}; drafters are for causal language models")
    if not isinstance(loaded.artifact, Artifact):
        raise RequestError(f"--drafters: {model} is an export, whose engine cannot take tokens back; give the artifact")
    reason = why_not(loaded.engine)
    if reason is not None:
        raise RequestError(f"--drafters: {reason}")
    target = Target(loaded.artifact, loaded.engine, bool(options.get("trust_remote_code")))
    prompts = prompts_of(loaded.tokenizer, text, loaded.engine.context_length, new_tokens)
    entries: list[dict[str, Any]] = []
    for name, value in candidates(loaded.artifact.manifest):
        speculation = choose_speculation(value, target)
        model_of = Model(loaded.engine, loaded.tokenizer, loaded.artifact, loaded.eos_token_ids, speculation)
        entries.append({"name": name, "drafter": value, "model": model_of, "ratios": {kind: [] for kind in prompts}})
    for number in range(repeat + 1):
        for kind, ids in prompts.items():
            plain = _seconds(loaded, ids, new_tokens, batch_size)
            for entry in entries:
                seconds = _seconds(entry["model"], ids, new_tokens, batch_size)
                if number:
                    entry["ratios"][kind].append(plain / seconds)
    for entry in entries:
        stats = entry.pop("model").stats
        ratios = entry.pop("ratios")
        entry["speedup"] = {kind: statistics.median(values) for kind, values in ratios.items()}
        entry["overall"] = math.exp(statistics.fmean(math.log(value) for value in entry["speedup"].values()))
        entry["mean_accepted"], entry["acceptance_rate"] = stats["mean_accepted"], stats["acceptance_rate"]
    entries.sort(key=lambda entry: -entry["overall"])
    fastest = entries[0]
    best = fastest if fastest["overall"] >= _GAIN else {"name": "none", "drafter": False}
    return {
        "model": model, "path": str(loaded.artifact.path), "drafters": entries, "best": best["name"], "drafter": best["drafter"],
        "kinds": list(prompts), "prompts": sum(map(len, prompts.values())), "new_tokens": new_tokens, "batch_size": batch_size,
    }  # fmt: skip


def candidates(manifest: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """(name, what `runtime.load` takes) of the drafters to be measured: those that need no model, the artifact's own, both together."""
    from runtime.decoding.drafters.methods import FREE

    found: list[tuple[str, Any]] = [(name, name) for name in FREE.names]
    if manifest is not None and manifest.get("draft") is not None:
        found.append(("own", True))
        found += [(f"{name}, then own", {"of": [name, True]}) for name in ("lookup", "suffix")]
    return found


def prompts_of(tokenizer: Any, text: Path | None, context: int | None, new_tokens: int) -> dict[str, list[list[int]]]:
    """{kind: prompts as token ids}, each leaving room for the new tokens."""
    from compress.distill.samples import sample_rows

    if tokenizer is None:
        raise RequestError("--drafters needs texts as prompts, and the model has no tokenizer")
    room = PROMPT if context is None else min(PROMPT, context - new_tokens)
    if room < 1:
        raise RequestError(f"{new_tokens} new tokens leave no room for a prompt in the model's context of {context}")
    if text is not None:
        ids = tokenizer(_read(text), add_special_tokens=False)["input_ids"]
        rows = [ids[start : start + room] for start in range(0, len(ids) - room + 1, room)]
        if not rows:
            raise RequestError(f"--text {text} has {len(ids)} tokens, less than one prompt of {room}")
        step = max(1, len(rows) // (3 * _MOST_PROMPTS))
        return {"text": rows[::step][: 3 * _MOST_PROMPTS]}
    found = {kind: rows[:_MOST_PROMPTS, :room].tolist() for kind, rows in sample_rows(tokenizer).items()}
    if "code" in found and (context is None or context >= 4 * PROMPT + new_tokens):
        found["edit"] = [_again(row, tokenizer) for row in sample_rows(tokenizer)["code"][:_MOST_PROMPTS].tolist()]
    if not found:
        raise RequestError(
            "--drafters: the model's tokenizer makes too few tokens of the samples; give prompts with --text"
        )
    return found


def _again(row: Sequence[int], tokenizer: Any) -> list[int]:
    """Code, and its beginning once more: what an edited file looks like."""
    divide = tokenizer("\n\n# The same again:\n\n", add_special_tokens=False)["input_ids"]
    return [*row, *divide, *row[: len(row) // 4]]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--text {path} cannot be read: {error}") from None


def _seconds(model: Any, prompts: Sequence[list[int]], new_tokens: int, batch_size: int) -> float:
    """Seconds of decoding all prompts, `batch_size` at a time."""
    total = 0.0
    for start in range(0, len(prompts), batch_size):
        model.generate(
            [list(ids) for ids in prompts[start : start + batch_size]], max_new_tokens=new_tokens, ignore_eos=True
        )
        total += model.stats["decode_seconds"]
    return total


def save_choice(directory: Path, result: Mapping[str, Any]) -> Path:
    """Write what `runtime.load` shall use for a directory from now on: `drafter.json`."""
    from compress.pipeline.files import write_json
    from runtime.cpu import facts as cpu_facts
    from runtime.decoding.drafters.choose import CHOICE

    if not directory.is_dir():
        raise RequestError(f"{directory} is no directory that a choice could be kept in; add --no-save")
    machine = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else ", ".join(cpu_facts("model name")).replace("\t", "")
    )
    facts = [{key: entry[key] for key in ("name", "speedup", "overall")} for entry in result["drafters"]]
    write_json(
        directory / CHOICE, {"schema_version": 1, "drafter": result["drafter"], "machine": machine, "measured": facts}
    )
    return directory / CHOICE
