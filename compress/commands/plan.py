"""Command `compress plan`: tensors, sizes, memory, disk and time of a recipe, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.commands.options import ALLOCATE, DEVICE, JSON, MAX_MEMORY, MODEL, OUTPUT, RECIPE, SET, memory_limit
from compress.commands.output import finish, print_table, show_cache, show_readers, stdout_reserved
from compress.core.units import duration, size
from runtime.errors import RequestError


def plan(
    recipe: str = RECIPE,
    model: str | None = MODEL,
    output: Path | None = OUTPUT,
    set_: list[str] = SET,
    device: str = DEVICE,
    max_memory: str | None = MAX_MEMORY,
    allocate: bool = ALLOCATE,
    as_json: bool = JSON,
) -> None:
    """Show what `apply` would do: tensors, sizes, memory, disk and time.

    Nothing is compressed or written. Exit code 2 means that the run would not fit.

    \b
    Examples:
      compress plan llama_w4_sparse
      compress plan recipes/llama_w4.yaml --model ~/models/my-llama --json
      compress plan llama_3.5bit --allocate
    """
    from compress.recipe import load

    limit = memory_limit(max_memory)
    loaded = load(recipe, model=model, output=output, set=set_)
    with stdout_reserved(as_json):
        from compress.run.plan import make_plan
        from export.readers import readable_by

        made = make_plan(loaded, device=device, max_memory=limit, readers=readable_by, allocate=allocate, quiet=as_json)
    failure = RequestError("; ".join(made.problems)) if made.problems else None
    finish(made.to_dict(), as_json, _show, failure)


def _show(result: dict[str, Any]) -> None:
    rows = []
    for tensor in result["tensors"]:
        how = ", ".join(part for part in (tensor["method"], tensor["format"]) if part)
        before, after = tensor["bytes_before"], tensor["bytes_after"]
        action = "shrunk" if tensor["action"] == "copied" and after < before else tensor["action"]
        rows.append((tensor["name"], action, how, size(before), size(after)))
    print_table(("tensor", "action", "method, format", "before", "after"), rows, right=(3, 4))
    for text in result["passes"]:
        print(f"First: {text}")
    before, after = result["bytes_before"], result["bytes_after"]
    print(f"Model: {result['model']}    Output: {result['output']}")
    print(f"Tensors: {size(before)} -> {size(after)} ({before / max(after, 1):.2f} times smaller)")
    print(f"Memory: about {size(result['peak_memory'])} of {size(result['available_memory'])} available")
    parts = [f"{name} {size(count)}" for name, count in result["memory"].items() if count]
    fixed = sum(result["memory"][name] > 0 for name in ("process", "workspace", "hidden states"))
    print(f"  {' + '.join(parts[:fixed])} + the largest of: {', '.join(parts[fixed:])}")
    if result["budget"] is not None:
        _show_budget(result["budget"])
    if result["bounds"]:
        print(f"  to stay within the limit: {result['bounds']}")
    if result["device_memory"]:
        print(f"GPU: about {size(result['device_memory'])} of {size(result['available_device_memory'])} available")
    print(f"Disk: about {size(result['disk_needed'])} of {size(result['disk_free'])} free")
    if result["kv_cache"] is not None:
        show_cache(result["kv_cache"]["description"], result["kv_cache"]["bytes"], result["kv_cache"]["needs"])
    if result["texts"]:
        print(f"{result['texts']}.")
    if result["limits"]:
        print(f"Limits: {', '.join(f'{name} {value:.4g}' for name, value in result['limits'].items())}")
    more = f" plus the draft ({result['draft']})" if result["draft"] else ""
    show_readers(result["readable_by"])
    if result["engine"]:
        print(f"Runs on {result['engine']}")
    print(f"Calibration: {result['calibration_tokens']:,} tokens    Time: about {duration(result['seconds'])}{more}")
    for text in result["warnings"]:
        print(f"Warning: {text}")


def _show_budget(budget: dict[str, Any]) -> None:
    """What shall be chosen, or what was."""
    amount = size(budget["amount"]) if budget["key"] == "size" else f"{budget['amount']}"
    if "units" not in budget:
        among = ", ".join(f"{name} ({size(count)})" for name, count in budget["candidates"].items())
        print(
            f"Budget: {budget['key']} {amount}, shared by {budget['layers']} layers. Size if all got one candidate: {among}"
        )
        print("  apply measures the layers and chooses; plan --allocate does it now and shows the choice")
        return
    rows = [
        (unit["layers"][0], len(unit["layers"]), unit["scheme"], f"{unit['bits']:.3f}", f"{unit['kl']:.2e}")
        for unit in budget["units"]
    ]
    print_table(("first layer of unit", "layers", "scheme", "bits", "predicted KL"), rows, right=(1, 3, 4))
    print(
        f"Budget: {budget['key']} {amount}: {budget['bits']:.4g} bits per weight, {size(budget['bytes'])}, predicted KL {budget['kl']:.4g}"
    )
