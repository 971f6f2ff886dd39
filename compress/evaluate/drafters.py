"""Drafters beside plain decoding, on the same prompts in turn, and the choice of the best for an artifact on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.core.files import write_json
from runtime.checkpoint.artifact import Artifact
from runtime.errors import RequestError
from runtime.sampling.stats import GenerationStats

if TYPE_CHECKING:
    import torch

# Decoding measured over several calls of a model.

_COUNTS = ("steps", "new_tokens", "sequences", "drafted_tokens", "accepted_tokens", "draft_rounds", "decode_seconds")
_BY_DEPTH = ("reached_by_depth", "accepted_by_depth")


def add(totals: GenerationStats, stats: Mapping[str, Any]) -> None:
    """One more call's `Model.stats` to the sums of others."""
    for name in _COUNTS:
        setattr(totals, name, getattr(totals, name) + stats[name])
    for name in _BY_DEPTH:
        pairs = zip_longest(getattr(totals, name), stats[name], fillvalue=0)
        setattr(totals, name, [one + other for one, other in pairs])


def decode(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, batch_size: int, temperature: float = 0.0
) -> tuple[list[list[int]], GenerationStats]:
    """What a model writes after prompts, `batch_size` at a time, and the sums of what that took.

    Its drafter begins without the texts of earlier calls, which may have been the very same.
    """
    if model.speculation is not None:
        model.speculation.drafter.forget()
    texts: list[list[int]] = []
    totals = GenerationStats()
    for start in range(0, len(prompts), batch_size):
        part = [list(ids) for ids in prompts[start : start + batch_size]]
        texts += model.generate(part, max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True)
        add(totals, model.stats)
    return texts, totals


PROMPT = 64  # tokens
_GAIN = 1.02  # a drafter must be so much faster than none to be chosen
_MOST_PROMPTS = 8  # of a kind


def compare(
    model: str,
    options: Mapping[str, Any],
    text: Path | None,
    new_tokens: int,
    batch_size: int,
    repeat: int,
    prompt_tokens: int | None = None,
) -> dict[str, Any]:
    """Load a model once and decode its prompts with each drafter that fits it, round after round, plain decoding in each round.

    Args:
        model: an artifact or a checkpoint.
        options: keywords of `runtime.load`.
        text: prompts are cut out of it; None: samples of prose, code and chat, and code to be written again.
        new_tokens: of a prompt.
        batch_size: prompts at once.
        repeat: rounds after one in which costs and rates are found. What was written in a round is forgotten before the next, in which
            the same prompts come again.
        prompt_tokens: of a prompt; None: 64, or less where the context is short.

    Returns:
        "drafters": [{"name", "drafter" (what `runtime.load` takes), "speedup": {kind: median ratio}, "overall": geometric mean,
        "mean_accepted", "acceptance_rate"}], best first; "skipped": {name: why it does not fit}; "best", "kinds", "prompts", "path".

    Raises:
        RequestError: the model verifies no drafts, or has no tokenizer while no text is tokenized for it.
    """
    import runtime
    from runtime.api.model import Model
    from runtime.drafting.config.build import Target, choose_speculation
    from runtime.drafting.config.target import UnfitError

    if text is not None:
        _read(text)  # before the model, which takes longer
    loaded = runtime.load(model, **{**options, "drafter": False})
    if not isinstance(loaded, Model):
        raise RequestError(f"{model} holds a {type(loaded).__name__}; drafters are for causal language models")
    if not isinstance(loaded.artifact, Artifact):
        raise RequestError(f"--drafters: {model} is an export, whose engine cannot take tokens back; give the artifact")
    reason = loaded.engine.why_not_drafts()
    if reason is not None:
        raise RequestError(f"--drafters: {reason}")
    target = Target(loaded.artifact, loaded.engine, bool(options.get("trust_remote_code")))
    prompts = prompts_of(loaded.tokenizer, text, loaded.engine.context_length, new_tokens, prompt_tokens)
    models: dict[str, tuple[Any, Model]] = {}
    skipped: dict[str, str] = {}
    for name, value in candidates(loaded.artifact.manifest, loaded.engine):
        try:
            speculation = choose_speculation(value, target)
        except UnfitError as error:
            skipped[name] = error.text
            continue
        models[name] = value, Model(loaded.engine, loaded.tokenizer, loaded.artifact, loaded.eos_token_ids, speculation)
    ratios: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in prompts} for name in models}
    totals = {name: GenerationStats() for name in models}
    for number in range(repeat + 1):
        for kind, ids in prompts.items():
            plain = decode(loaded, ids, new_tokens, batch_size)[1].decode_seconds
            for name, (_, drafting) in models.items():
                found = decode(drafting, ids, new_tokens, batch_size)[1].as_dict()
                if number:
                    ratios[name][kind].append(plain / found["decode_seconds"])
                    add(totals[name], found)
    entries = []
    for name, (value, _) in models.items():
        speedup = {kind: statistics.median(values) for kind, values in ratios[name].items()}
        entries.append({
            "name": name, "drafter": value, "speedup": speedup, "overall": statistics.geometric_mean(speedup.values()),
            "mean_accepted": totals[name].mean_accepted, "acceptance_rate": totals[name].acceptance_rate,
        })  # fmt: skip
    entries.sort(key=lambda entry: -entry["overall"])
    fastest = entries[0]
    best = fastest if fastest["overall"] >= _GAIN else {"name": "none", "drafter": False}
    return {
        "model": model, "path": str(loaded.artifact.path), "drafters": entries, "best": best["name"], "drafter": best["drafter"],
        "skipped": skipped,
        "kinds": list(prompts), "prompts": sum(map(len, prompts.values())), "new_tokens": new_tokens, "batch_size": batch_size,
    }  # fmt: skip


def candidates(manifest: Mapping[str, Any] | None, engine: Any) -> list[tuple[str, Any]]:
    """(name, what `runtime.load` takes) of the drafters to be measured: those that need no model, the target's own first layers where its
    engine can compute them alone, the artifact's own draft, and this after one that needs no model.
    """
    from runtime.drafting.config.registry import drafters
    from runtime.engines.native.sublayers import parts_of

    found: list[tuple[str, Any]] = [(method.name, method.name) for method in drafters("text")]
    if not isinstance(parts_of(engine), str):
        found.append(("early-exit", {"method": "early-exit", "layer": "auto"}))
    if manifest is not None and manifest.get("draft") is not None:
        found.append(("own", True))
        if manifest["draft"].get("method") == "distillspec":
            found.append(("own, as a tree", {"model": True, "method": "dynamic-tree"}))
        found += [(f"{name}, then own", {"of": [name, True]}) for name in ("lookup", "suffix")]
    return found


def prompts_of(
    tokenizer: Any, text: Path | None, context: int | None, new_tokens: int, prompt_tokens: int | None = None
) -> dict[str, list[list[int]]]:
    """{kind: prompts as token ids}, each leaving room for the new tokens."""
    from compress.data.samples import sample_rows

    if tokenizer is None:
        raise RequestError("--drafters needs texts as prompts, and the model has no tokenizer")
    wanted = prompt_tokens or PROMPT
    room = wanted if context is None else min(wanted, context - new_tokens)
    if room < 1 or (prompt_tokens and room < prompt_tokens):
        size = "a prompt" if prompt_tokens is None else f"a prompt of {prompt_tokens}"
        raise RequestError(f"{new_tokens} new tokens leave no room for {size} in the model's context of {context}")
    if text is None and room > PROMPT:
        raise RequestError(
            f"--prompt-tokens {prompt_tokens}: with --drafters the samples give prompts of {PROMPT} at most; give longer ones with --text"
        )
    if text is not None:
        ids = tokenizer(_read(text), add_special_tokens=False)["input_ids"]
        rows = [ids[start : start + room] for start in range(0, len(ids) - room + 1, room)]
        if not rows:
            raise RequestError(f"--text {text} has {len(ids)} tokens, less than one prompt of {room}")
        step = max(1, len(rows) // (3 * _MOST_PROMPTS))
        return {"text": rows[::step][: 3 * _MOST_PROMPTS]}
    samples = sample_rows(tokenizer, most=_MOST_PROMPTS)
    found = {kind: rows[:, :room].tolist() for kind, rows in samples.items()}
    if "code" in found and (context is None or context >= 4 * PROMPT + new_tokens):
        found["edit"] = [_again(row, tokenizer) for row in samples["code"].tolist()]
    if not found:
        raise RequestError("--drafters: the tokenizer makes too few tokens of the samples; give prompts with --text")
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


def write_choice(path: Path, value: Any, artifact: Artifact, device: torch.device, measured: Any = None) -> Path:
    """Write drafter.json, which `runtime.load` follows on this machine.

    Args:
        path: the directory; the others are as of `choice_content`.

    Returns:
        The file; it is there whole or as it was.

    Raises:
        RequestError: there is no such directory, nothing can be written there, or `value` names a directory.
    """
    from runtime.drafting.config.artifact_draft import CHOICE, choice_content

    if not path.is_dir():
        raise RequestError(f"{path} is no directory for a drafter.json; add --no-save")
    content, file = choice_content(value, artifact, device, measured), path / CHOICE
    try:
        write_json(file, content)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror or error}; add --no-save") from error
    return file
