"""What a compressed KV cache costs in quality, for its bytes: our policies beside kvpress on the same model, prompts and budgets.

    python benchmarks/kv_quality.py --peer DIR/kvpress/bin/python          (DIR: benchmarks/peers/setup_kv.sh DIR)

Retrieval has a real answer: a small model that finds everything with its full cache (recipes/checkpoints/recall-1m) is asked for
values of keys: a few hidden in text, asked for when the context is compressed already, and one of hundreds, with the question at the end of
the prompt. Likelihood is that
of the last quarter of held-out texts of 1024 tokens under the bundled language model (with YaRN), what is before it compressed; and of
texts of 768 decoded token by token, for what evicts or chooses while decoding.
Budgets are bytes of the cache as
allocated (of kvpress: what it would hold if masked entries were freed), as shares of a plain cache; each seed draws its own items.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kv_cells import Evaluator, Method, Ratios
from kv_methods import BUDGETS, METHODS
from where import commit, cpu_name

HERE = Path(__file__).resolve().parent
CHECKPOINTS = HERE.parent / "recipes" / "checkpoints"
#: Tokens of a window of text, and of its prompt.
TEXTS = ((1024, 768),)
#: Tokens of a text that is decoded, and of its prompt.
DECODED = (768, 32)
#: The bundled language model was trained on 256 tokens; with YaRN it reads as many as this and predicts better for it.
ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
#: Task, and whether the question is part of what is compressed. A context full of pairs that are asked for later is left out: nobody
#: can know which to keep.
RETRIEVAL = (("needle", False), ("recall", True))
#: What a plain cache holds. Both sides compute in --dtype, whose bytes are not counted: of kvpress as many of these as it keeps.
FLOATS = "bfloat16"
RESULT = HERE / "results" / "kv_quality.json"


def main() -> None:
    arguments = options()
    torch.set_num_threads(arguments.threads)
    work = Path(arguments.work or tempfile.mkdtemp(prefix="kv_quality_"))
    work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for name, job in jobs(arguments, work):
        job["gates"] = calibrated(job["model"], work)["gates"]
        rows += [{**row, "job": name, "tool": "compress"} for row in ours(job, name, work)]
        if arguments.peer:
            theirs, versions = peer(arguments.peer, job, name, work)
            rows += [{**row, "job": name, "tool": "kvpress"} for row in theirs]
    measured = cells(rows)
    before: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.add else {}
    kept = [cell for cell in before.get("cells", []) if identity(cell) not in {identity(new) for new in measured}]
    result = {
        "machine": cpu_name(), "threads": arguments.threads, "dtype": arguments.dtype, "kvpress": versions or before.get("kvpress", {}),
        "cells": [*kept, *({**cell, "commit": commit()} for cell in measured)],
    }  # fmt: skip
    arguments.output.write_text(written(result))
    print(f"{len(rows)} rows, {len(measured)} cells, {len(kept)} kept: {arguments.output}", file=sys.stderr)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python of kvpress's environment; without it only ours is measured")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--add", action="store_true", help="to --output, whose other cells stay")
    parser.add_argument("--work", help="where finished jobs are kept, so that a run can go on")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096])
    parser.add_argument("--tasks", nargs="*", default=[task for task, _ in RETRIEVAL], help="of retrieval")
    parser.add_argument("--examples", type=int, default=6, help="contexts a task, length and seed")
    parser.add_argument("--questions", type=int, default=8, help="of a context, where they are not known before")
    parser.add_argument("--aware-questions", type=int, default=2, help="of a context, where each is part of the prompt")
    parser.add_argument("--texts", type=int, default=6, help="texts a seed")
    parser.add_argument("--decoded", type=int, default=2, help="texts a seed that are decoded token by token")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="names of our methods")
    return parser.parse_args()


# ---------------------------------------------------------------- what is measured
def jobs(arguments: argparse.Namespace, work: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each with one model and one length, so that one ratio fits all its items."""
    found = []
    for seed in arguments.seeds:
        for length in arguments.lengths:
            for task, aware in (known for known in RETRIEVAL if known[0] in arguments.tasks):
                count = arguments.aware_questions if aware else arguments.questions
                items = retrieval_items(task, length, arguments.examples, count, seed)
                name = f"{task}-{length}-{'known' if aware else 'later'}-{seed}"
                found.append((name, job(arguments, seed, CHECKPOINTS / "recall-1m", query_aware=aware, items=items)))
        if arguments.texts:
            texts = [text_items(length, prompt, arguments.texts, seed) for length, prompt in TEXTS]
            found += [
                (f"text-{length}-{seed}", job(arguments, seed, stretched(work), texts=items))
                for (length, _), items in zip(TEXTS, texts, strict=True)
            ]
        if arguments.decoded:
            steps = text_items(*DECODED, arguments.decoded, seed)
            found.append((f"steps-{DECODED[0]}-{seed}", job(arguments, seed, stretched(work), steps=steps)))
    return found


def job(arguments: argparse.Namespace, seed: int, model: Path, **parts: Any) -> dict[str, Any]:
    """What both sides are given."""
    return {
        "dtype": arguments.dtype, "threads": arguments.threads, "budgets": list(BUDGETS), "only": arguments.only, "seed": seed,
        "model": str(model), "query_aware": False, "items": [], "texts": [], "steps": [], **parts,
    }  # fmt: skip


def stretched(work: Path) -> Path:
    """The bundled language model, with a rotary embedding that reaches further."""
    target = work / "stdlib-4m-yarn"
    if not target.exists():
        shutil.copytree(CHECKPOINTS / "stdlib-4m", target)
        config = json.loads((target / "config.json").read_text())
        config["rope_parameters"] = ROPE
        (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def retrieval_items(task: str, length: int, count: int, questions: int, seed: int) -> list[dict[str, Any]]:
    """Contexts of exactly `length` tokens and their questions, as both sides read them."""
    sys.path.insert(0, str(CHECKPOINTS))
    import recall_task
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "recall-1m")
    vocabulary = recall_task.Vocabulary.from_tokenizer(tokenizer)
    text = recall_task.load_text(tokenizer)
    examples = recall_task.evaluation_set(
        vocabulary, task, length, text=text, examples=count, questions=questions, seed=seed
    )
    return [
        {
            "id": index, "context": example.context.tolist(),
            "questions": [{"ids": q.ids.tolist(), "answer": q.answer.tolist()} for q in example.questions],
        }
        for index, example in enumerate(examples)
    ]  # fmt: skip


def text_items(length: int, prompt: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Windows of the held-out text; other windows for every seed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "stdlib-4m")
    ids = tokenizer((CHECKPOINTS / "texts" / "heldout.txt").read_text(encoding="utf-8")).input_ids
    windows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(windows), generator=generator)[:count].tolist()
    return [{"id": i, "ids": windows[i], "prompt": prompt} for i in chosen]


# ---------------------------------------------------------------- measuring
@torch.no_grad()
def ours(job: dict[str, Any], name: str, work: Path) -> list[dict[str, Any]]:
    """All our methods on one job."""
    from transformers import AutoModelForCausalLM

    from runtime.kv_cache.cache import prepare

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])).eval()
    prepare(model)
    evaluator = Evaluator(model, getattr(torch, FLOATS))
    done = work / f"{name}.ours.json"
    rows: list[dict[str, Any]] = json.loads(done.read_text()) if done.exists() else []
    finished = {(row["method"], row["budget"]) for row in rows}
    full = Method("full cache", {}, fixed=True)
    ratios = Ratios(evaluator, work / "ratios.json", job["model"])
    chosen = [m for m in METHODS if m.serves(job) and (job["only"] is None or m.name in job["only"])]
    for method in (full, *chosen):
        known = {
            name: value
            for name, value in calibrated(job["model"], work).items()
            if name in ("fingerprint", *method.needs)
        }
        for budget in [None] if method.fixed else job["budgets"]:
            if (method.name, budget) in finished:
                continue
            started = time.perf_counter()
            facts = {"method": method.name, "budget": budget, "ratio": None, "peers": list(method.peers)}
            tokens = None
            if method.decodes:
                tokens = round(budget * DECODED[0])
            elif method.whole or method.reads:
                facts["ratio"] = budget
            elif not method.fixed:
                facts["ratio"] = ratios.of(method, prompt_of(job), budget)
                if facts["ratio"] is None:
                    rows.append({**facts, "error": "what it always keeps is more than the budget"})
                    continue
            try:
                policy = method.at(facts["ratio"], known if method.needs else None, tokens)
            except ValueError as error:  # a window that is no smaller than the budget
                rows.append({**facts, "error": str(error)})
                continue
            for row in (
                *evaluator.retrieval(job["items"], policy, job["query_aware"]),
                *evaluator.texts(job["texts"], policy),
                *evaluator.steps(job["steps"], policy),
            ):
                rows.append({**facts, **row})
            done.write_text(json.dumps(rows))
            print(f"{name}: {method.name} {budget or ''} {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return rows


def prompt_of(job: dict[str, Any]) -> list[int]:
    """One prompt, as long as all of the job."""
    probe = (job["items"] or job["texts"])[0]
    if "prompt" in probe:
        return list(probe["ids"][: probe["prompt"]])
    return [*probe["context"], *(probe["questions"][0]["ids"] if job["query_aware"] else [])]


def calibrated(model: str, work: Path) -> dict[str, Any]:
    """What methods must know of a checkpoint, found once, on the text for calibration."""
    file = work / f"{Path(model).name}.calibrated.json"
    if not file.exists():
        from transformers import AutoTokenizer

        from compress.kv_cache.calibrate import calibrate

        text = (CHECKPOINTS / "texts" / "calibration.txt").read_text(encoding="utf-8")
        ids = AutoTokenizer.from_pretrained(model)(text).input_ids
        rows = torch.tensor([ids[i : i + 512] for i in range(0, 64 * 512, 512)])
        with torch.enable_grad():
            file.write_text(json.dumps(calibrate(Path(model), {"gates", "channels", "prefix_tokens"}, rows)))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def peer(python: str, job: dict[str, Any], name: str, work: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The same job in kvpress; a finished one is not run again."""
    written, out = work / f"{name}.job.json", work / f"{name}.kvpress.json"
    if not out.exists():
        written.write_text(json.dumps({key: value for key, value in job.items() if key != "only"}))
        subprocess.run([python, str(HERE / "peers" / "kv_press.py"), str(written), str(out)], check=True)
    found = json.loads(out.read_text())
    for row in found["rows"]:
        if row.get("nll") is not None:  # a mean there
            row["nll"] *= row["tokens"]
    return found["rows"], {key: found[key] for key in ("kvpress", "transformers", "torch")}


# ---------------------------------------------------------------- cells
def written(result: dict[str, Any]) -> str:
    """As JSON, a cell a line."""
    head = json.dumps({key: value for key, value in result.items() if key != "cells"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(cell)}" for cell in result["cells"])
    return f'{head[:-2]},\n "cells": [\n{lines}\n ]\n}}\n'


def identity(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What a cell is of."""
    return tuple(cell[key] for key in ("tool", "method", "budget", "job", "seed"))


def cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one tool, method, budget, kind of job and seed together: accuracy or likelihood, and the share of the bytes."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kind, _, seed = row["job"].rpartition("-")
        groups.setdefault((row["tool"], row["method"], row["budget"], kind, int(seed)), []).append(row)
    found = []
    for (tool, method, budget, kind, seed), group in groups.items():
        cell: dict[str, Any] = {"tool": tool, "method": method, "budget": budget, "job": kind, "seed": seed}
        good = [row for row in group if not row.get("error")]
        if group[0].get("peers"):
            cell["peers"] = group[0]["peers"]
        if len(good) < len(group) or not good:
            cell["error"] = next(row["error"] for row in group if row.get("error"))
            found.append(cell)
            continue
        size = sum(row.get("nominal_bytes") or row["cache_bytes"] for row in good)
        cell["bytes"] = round(size / sum(row["full_bytes"] for row in good), 4)
        if group[0].get("reads") is not None:
            cell["reads"] = round(sum(row["reads"] for row in good) / len(good), 4)
        if kind.startswith(("text", "steps")):
            cell["nll"] = round(sum(row["nll"] for row in good) / sum(row["tokens"] for row in good), 5)
        else:
            cell["correct"], cell["asked"] = (sum(row[key] for row in good) for key in ("correct", "asked"))
        found.append(cell)
    return found


if __name__ == "__main__":
    main()
