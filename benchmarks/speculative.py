#!/usr/bin/env python
"""Speculative decoding beside plain decoding of the same artifact, and beside transformers' assisted generation and prompt lookup.

    python benchmarks/speculative.py --work DIRECTORY --json benchmarks/results/speculative_cpu.json
    python benchmarks/speculative.py --work DIRECTORY --shape small --new-tokens 32 --rounds 1        a smoke test

What is measured on is made first, in DIRECTORY: the bundled checkpoint, quantized to 4 bits, with a draft distilled from it; and both
inside a model of 1.0 billion weights that computes the same (`expand_core.py`), so that texts and acceptance are those of trained models
while the time of a step is a large one's. The draft stands in a model of its own size (`--draft-shape`): its layers are as wide as the
target's ("target"), or half as wide ("draft": 3 layers are 4 % of the target's weights, as 270 million for a target of 7 billion).

Prompts: held-out text of the model's domain, prose, code, conversation, and code that is to be written again ("edit", and "edited twice",
where it was already). With `--core copying` the bundled checkpoint is first taught to copy (`copying_core.py`), as large models do when
they edit: the last two kinds are measured with it, the others with the checkpoint as it is. Every ratio is within a round, in which plain
decoding and the drafters take turns on the same prompts; medians over the rounds. What a drafter has written in a round is forgotten
before the next. Times are of decoding, and a draft model's reading of the prompt is in them. Greedy texts are compared token by token with
plain decoding's: exit code 1 where any differs.

The peer is transformers' own decoding of the same artifact with the same draft: its modules, in which the weights are unpacked to
bfloat16, the same prompts and tokens, batch 1 (all that its assisted generation takes), at its default lengths and at a fixed one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from copying_core import FACTS, teach
from expand_core import SHAPES, check, expand
from where import commit, cpu_facts, cpu_name

from compress.evaluate.drafters import add, decode
from runtime.sampling.stats import GenerationStats

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "recipes" / "checkpoints" / "stdlib-4m"
HELD_OUT = HERE.parent / "recipes" / "checkpoints" / "texts" / "heldout.txt"
PROMPT = 64
KINDS = {"bundled": ("held-out", "text", "code", "chat"), "copying": ("edit", "edited twice")}  # by core
CONTINUATIONS = 8
SETTINGS = (
    "core", "shape", "target_scheme", "draft_shape", "draft_layers", "draft_scheme", "prompts", "new_tokens", "rounds", "steps", "samples",
    "peer_rounds",
)  # fmt: skip
QUANTIZE = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 128}}


# -------------------------------------------------------------------- what is measured on
def prepare(
    work: Path,
    shape: str,
    layers: int,
    steps: int,
    samples: int,
    draft_scheme: str,
    draft_shape: str = "draft",
    target_scheme: str = "W4A16",
    core: str = "bundled",
) -> dict[str, Path]:
    """The artifact with its distilled draft, and both in the large shape; what was made with the same settings is used again."""
    import compress

    draft = {
        "method": "distillspec", "layers": layers, "data": "teacher", "samples": samples, "continuations": CONTINUATIONS, "steps": steps,
        "learning_rate": 3e-3, "quantize": "none", "patience": None, "evaluate_every": 100,
    }  # fmt: skip
    key = hashlib.sha256(json.dumps([QUANTIZE, draft], sort_keys=True).encode()).hexdigest()[:8]
    source, mark = SOURCE, ""
    if core == "copying":
        source, mark = work / "copying", "-copying"
        if not (source / FACTS).is_file():
            teach(source)
    small = work / f"small{mark}-{key}"
    if not (small / "compress.json").is_file():
        recipe = {"name": "small", "model": str(source), "stages": [QUANTIZE, {"draft": draft}]}
        compress.apply(recipe, output=str(small), resume=(small / ".compress").is_dir())
    if shape == "small":
        return {"small": small, "target": small, "draft": small / "draft"}
    made = {"small": small}
    # A draft's head is quantized too, as the draft stage does it: it is read for every token that is proposed.
    wide = shape if draft_shape == "target" else draft_shape
    for name, dense_core, size, deep, stage, file in (
        ("target", source, shape, None, {**QUANTIZE["quantize"], "scheme": target_scheme}, f"target{mark}-{shape}-{target_scheme}"),
        ("draft", small / "draft", wide, layers, {**QUANTIZE["quantize"], "scheme": draft_scheme, "ignore": []},
         f"draft{mark}-{wide}-{key}-{draft_scheme}"),
    ):  # fmt: skip
        path = work / file
        if not (path / "compress.json").is_file():
            dense = work / f"{file}-dense"
            expand(dense_core, dense, SHAPES[size], deep)
            off = check(dense_core, dense)
            if off > 0.1:  # bfloat16 rounds the scaled norms
                raise SystemExit(
                    f"{dense} does not compute what {dense_core} does: {off:.3f} of the spread of its logits"
                )
            compress.apply(
                {"name": name, "model": str(dense), "stages": [{"quantize": stage}]}, output=str(path), quiet=True
            )
            shutil.rmtree(dense)
        made[name] = path
    return made


def distilled(small: Path) -> dict[str, Any]:
    """What distillation did for the draft: acceptance before and after, on held-out rows of the domain and on the three kinds."""
    facts = json.loads((small / "compress.json").read_text(encoding="utf-8"))["draft"]["facts"]

    def rates(side: str) -> dict[str, Any]:
        return {
            kind: {
                f"{what}, {how}": round(found[what][how]["acceptance"], 4)
                for what in ("text", "continuations")
                for how in ("greedy", "sampling")
                if found[what][how] is not None
            }
            for kind, found in facts[side].items()
        }

    return {side: rates(side) for side in ("before", "after")}


def prompts_of(tokenizer: Any, count: int) -> dict[str, list[list[int]]]:
    """{kind: prompts}, `count` of each."""
    from compress.data.samples import sample_rows

    ids = tokenizer(HELD_OUT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    step = len(ids) // (count + 1)
    found = {"held-out": [ids[start : start + PROMPT] for start in range(step, step * count + 1, step)]}
    found |= {kind: rows.tolist() for kind, rows in sample_rows(tokenizer, most=count).items()}
    divide = tokenizer("\n\n# The same again:\n\n", add_special_tokens=False)["input_ids"]
    code = sample_rows(tokenizer, most=1000)["code"].flatten().tolist()  # without gaps
    size = 3 * PROMPT
    starts = list(range(0, max(1, len(code) - size), max(1, (len(code) - size) // count)))[:count]
    found["edit"] = [[*code[at : at + size], *divide, *code[at : at + PROMPT // 2]] for at in starts]
    # Small models copy only what they have seen copied: the same file twice, then a third time.
    size = 2 * PROMPT
    again = [[*code[at : at + size], *divide] for at in starts]
    found["edited twice"] = [[*text, *text, *text[: PROMPT // 2]] for text in again]
    return found


def chosen(prompts: dict[str, list[list[int]]], options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Those of the kinds that are asked for, or that the core is measured on."""
    return {kind: rows for kind, rows in prompts.items() if kind in (options.kinds or KINDS[options.core])}


# -------------------------------------------------------------------- ours
DRAFTERS: dict[str, Any] = {
    "lookup": "lookup", "suffix": "suffix", "recycling": "recycling", "draft": "DRAFT",
    "dynamic-tree": {"model": "DRAFT", "method": "dynamic-tree"}, "lookup, then draft": {"of": ["lookup", "DRAFT"]},
}  # fmt: skip


def ours(paths: dict[str, Path], options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Rows of {drafter, kind, temperature, batch}: tokens a second and the ratio to plain decoding."""
    import runtime
    from runtime.api.model import Model
    from runtime.drafting.config.build import Target, choose_speculation

    # No prompt may be found in the cache: plain decoding comes first, and drafters read prompts.
    plain = runtime.load(paths["target"], drafter=False, prefix_cache=0, threads=options.threads, device=options.device)
    prompts = chosen(prompts_of(plain.tokenizer, options.prompts), options)
    target = Target(plain.artifact, plain.engine)
    models = {}
    for name in options.drafters or DRAFTERS:
        value = json.loads(json.dumps(DRAFTERS[name]).replace("DRAFT", str(paths["draft"])))
        models[name] = Model(
            plain.engine, plain.tokenizer, plain.artifact, plain.eos_token_ids, choose_speculation(value, target), 0
        )
    rows: list[dict[str, Any]] = []
    result["ours"] = {"engine": plain.stats["engine"], "weight_bytes": plain.stats["weight_bytes"], "rows": rows}
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            for kind, ids in prompts.items():
                row = {"temperature": temperature, "batch": batch, "kind": kind}
                rows += [row | found for found in _turns(plain, models, ids, temperature, batch, options)]
                for found in rows[-len(models) :]:
                    print(json.dumps(found), file=sys.stderr, flush=True)
                write(result, options.json)


def _turns(
    plain: Any,
    models: dict[str, Any],
    ids: list[list[int]],
    temperature: float,
    batch: int,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    ratios: dict[str, list[float]] = {name: [] for name in models}
    speeds: dict[str, list[float]] = {name: [] for name in [*models, "plain"]}
    same = dict.fromkeys(models, True)
    totals = {name: GenerationStats() for name in models}
    for number in range(options.rounds + 1):
        texts, taken = decode(plain, ids, options.new_tokens, batch, temperature)
        before = _rate(taken)
        for name, model in models.items():
            found, taken = decode(model, ids, options.new_tokens, batch, temperature)
            if temperature == 0:
                same[name] &= found == texts
            if number:  # the first round is for the drafters to learn what things cost
                ratios[name].append(_rate(taken) / before)
                speeds[name].append(_rate(taken))
                add(totals[name], taken.as_dict())
        if number:
            speeds["plain"].append(before)
    return [
        {
            "drafter": name, "speedup": round(statistics.median(ratios[name]), 3), "speedups": [round(each, 3) for each in ratios[name]],
            "tokens_per_second": round(statistics.median(speeds[name]), 2),
            "plain_tokens_per_second": round(statistics.median(speeds["plain"]), 2),
            "same_text": same[name] if temperature == 0 else None, **_short(totals[name].as_dict()),
        }
        for name in models
    ]  # fmt: skip


_KEPT = ("steps", "drafted_tokens", "accepted_tokens", "acceptance_rate", "mean_accepted", "acceptance_by_depth")


def _short(facts: dict[str, Any]) -> dict[str, Any]:
    """What is told of a row, rates with three digits."""
    return {
        key: [round(each, 3) for each in value] if isinstance(value, list) else round(value, 3) if isinstance(value, float) else value
        for key in _KEPT for value in (facts[key],)
    }  # fmt: skip


def _rate(taken: GenerationStats) -> float:
    """Tokens a second of decoding: all but the first of each text, which comes out of the prompt."""
    return (taken.new_tokens - taken.sequences) / taken.decode_seconds


# -------------------------------------------------------------------- the peer
LOOKUP, FIXED = {"prompt_lookup_num_tokens": 8}, 4


def peers(paths: dict[str, Path], options: argparse.Namespace, result: dict[str, Any]) -> None:
    """transformers' assisted generation and prompt lookup: the same artifact and draft in its own modules, batch 1."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import runtime  # noqa: F401  (teaches transformers the formats)

    torch.set_num_threads(options.threads or torch.get_num_threads())
    load = {"dtype": torch.bfloat16}
    model: Any = AutoModelForCausalLM.from_pretrained(paths["target"], **load).eval().to(options.device)
    assistant: Any = AutoModelForCausalLM.from_pretrained(paths["draft"], **load).eval().to(options.device)
    prompts = chosen(prompts_of(AutoTokenizer.from_pretrained(paths["target"]), options.prompts), options)
    own = {key: getattr(assistant.generation_config, key) for key in _ASSISTANT}
    fixed = dict(zip(_ASSISTANT, (FIXED, "constant", 0.0), strict=True))
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "lookup": (LOOKUP, own), "draft": ({"assistant_model": assistant}, own),
        f"draft, {FIXED} tokens": ({"assistant_model": assistant}, fixed),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    result["transformers"] = {"version": transformers.__version__, "rows": rows}
    for temperature in (0.0, 1.0):
        for kind, ids in prompts.items():
            ratios: dict[str, list[float]] = {name: [] for name in ways}
            speeds: dict[str, list[float]] = {name: [] for name in [*ways, "plain"]}
            for number in range(options.peer_rounds + 1):
                # The first round, of one prompt, is for the modules to warm up.
                part = ids if number else ids[:1]
                before = _assisted(model, part, temperature, options.new_tokens, {})
                if number:
                    speeds["plain"].append(before)
                for name, (more, lengths) in ways.items():
                    assistant.generation_config.update(**lengths)
                    rate = _assisted(model, part, temperature, options.new_tokens, more)
                    if number:
                        ratios[name].append(rate / before)
                        speeds[name].append(rate)
            for name in ways:
                row = {
                    "temperature": temperature, "batch": 1, "kind": kind, "drafter": name,
                    "speedup": round(statistics.median(ratios[name]), 3),
                    "tokens_per_second": round(statistics.median(speeds[name]), 2),
                    "plain_tokens_per_second": round(statistics.median(speeds["plain"]), 2),
                }  # fmt: skip
                rows.append(row)
                print("transformers", json.dumps(row), file=sys.stderr, flush=True)
            write(result, options.json)


_ASSISTANT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def _assisted(model: Any, prompts: list[list[int]], temperature: float, new: int, more: dict[str, Any]) -> float:
    """Tokens a second of decoding: of each prompt the time of one token, which is the target's prefill, is taken off."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    seconds = 0.0
    for ids in prompts:
        inputs = torch.tensor([ids], device=model.device)
        for count, sign, extra in ((1, -1, {}), (new, 1, more)):
            started = time.perf_counter()
            model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                eos_token_id=None, **sampling, **extra,
            )  # fmt: skip
            seconds += sign * (time.perf_counter() - started)
    return len(prompts) * (new - 1) / seconds


def machine(device: str) -> dict[str, Any]:
    """The processor, as far as it decides times, and the GPU."""
    facts = cpu_facts()
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
    flags = [flag for flag in facts.get("flags", "").split() if flag in known]
    return {
        "cpu": cpu_name(),
        "family": facts.get("cpu family"),
        "model": facts.get("model"),
        "flags": flags,
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=["small", "1.1b", "3b"], default="1.1b")
    parser.add_argument("--draft-scheme", choices=["W4A16", "W8A16"], default="W4A16")
    parser.add_argument("--draft-shape", choices=["draft", "target"], default="draft")
    parser.add_argument("--target-scheme", choices=["W4A16", "W8A16"], default="W4A16")
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS)
    parser.add_argument("--core", choices=KINDS, default="bundled")
    parser.add_argument("--kinds", nargs="*", choices=[kind for kinds in KINDS.values() for kind in kinds])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int, default=900, help="of the draft's training")
    parser.add_argument("--samples", type=int, default=448, help="rows that it is trained on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peer-rounds", type=int, default=1)
    options = parser.parse_args()
    paths = prepare(
        options.work, options.shape, options.draft_layers, options.steps, options.samples, options.draft_scheme, options.draft_shape,
        options.target_scheme, options.core,
    )  # fmt: skip
    result: dict[str, Any] = {
        "machine": machine(options.device), "commit": commit(), "threads": options.threads or torch.get_num_threads(),
        "torch": torch.__version__, "settings": {key: getattr(options, key) for key in SETTINGS}, "distillation": distilled(paths["small"]),
        "copying": json.loads((options.work / "copying" / FACTS).read_text(encoding="utf-8")) if options.core == "copying" else None,
        "draft_bytes": sum(file.stat().st_size for file in paths["draft"].glob("*.safetensors")),
    }  # fmt: skip
    ours(paths, options, result)
    if not options.no_peers:
        peers(paths, options, result)
    print(write(result, options.json))
    wrong = [row for row in result["ours"]["rows"] if row["same_text"] is False]
    if wrong:
        raise SystemExit(f"{len(wrong)} rows wrote other greedy texts than plain decoding: {wrong[0]}")


def write(result: dict[str, Any], path: Path | None) -> str:
    """The result so far as text, into the file too."""
    text = json.dumps(result, indent=1)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return text


if __name__ == "__main__":
    main()
