"""The cells of the comparison (what is asked of every tool) and the variants (with which of a tool's settings)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TOOLS = ("ours", "llmcompressor", "gptqmodel", "autoround")


@dataclass(frozen=True)
class Cell:
    """One thing to ask for: a quantization (bits, group_size with -1 = channel, symmetric; or a scheme), a pruning, or both."""

    name: str
    quantize: dict[str, Any] | None = None
    prune: dict[str, Any] | None = None

    @property
    def method(self) -> str:
        """The method in the words of the table."""
        parts = [part["method"] for part in (self.prune, self.quantize) if part]
        return " + ".join(parts)


@dataclass(frozen=True)
class Variant:
    """One tool with one choice of settings; `default` leaves every knob of quality where the tool has it."""

    tool: str
    name: str = "default"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name in the JSON."""
        return self.tool if self.name == "default" else f"{self.tool}:{self.name}"


GRIDS = {"w4-g128": (4, 128), "w3-g128": (3, 128), "w4-channel": (4, -1), "w2-g64": (2, 64)}
PATTERNS = {"50": "unstructured", "2:4": "2:4"}


def _quantize(method: str, grid: str, symmetric: bool = True) -> dict[str, Any]:
    bits, group_size = GRIDS[grid]
    return {"method": method, "bits": bits, "group_size": group_size, "symmetric": symmetric}


def _prune(method: str, pattern: str) -> dict[str, Any]:
    return {"method": method, "sparsity": 0.5, "pattern": PATTERNS[pattern]}


CELLS: tuple[Cell, ...] = (
    *(Cell(f"{method}-{grid}", _quantize(method, grid)) for method in ("rtn", "gptq", "awq") for grid in GRIDS),
    *(Cell(f"awq-asym-{grid}", _quantize("awq", grid, symmetric=False)) for grid in GRIDS),
    *(
        Cell(f"{method}-{pattern}", None, _prune(method, pattern))
        for method in ("sparsegpt", "wanda")
        for pattern in PATTERNS
    ),
    *(
        Cell(f"{method}-{scheme.lower()}", {"method": method, "scheme": scheme})
        for method in ("rtn", "gptq")
        for scheme in ("NVFP4A16", "MXFP4A16", "NVFP4", "MXFP4", "W4AFP8", "FP8_BLOCK")
    ),
    Cell("sparsegpt-2:4+gptq-w4-g128", _quantize("gptq", "w4-g128"), _prune("sparsegpt", "2:4")),
)


def variants(cell: Cell) -> list[Variant]:
    """Who runs a cell: each tool with its defaults, and the peers once more with their better settings where they have any."""
    result = [Variant("ours"), Variant("llmcompressor")]
    method = cell.quantize["method"] if cell.quantize else None
    if method is not None:
        settings: dict[str, Any] = {"observer": "memoryless_mse"}
        if method == "awq":
            settings["duo_scaling"] = "both"
        result.append(Variant("llmcompressor", "tuned", settings))
    if cell.prune and method == "gptq":
        # Its GPTQ fills pruned positions again; rounding to the nearest after SparseGPT is what keeps 2:4 there.
        result.append(Variant("llmcompressor", "sparsegpt then rtn", {"quantize_method": "rtn"}))
    if cell.quantize and "scheme" in cell.quantize:  # GPTQModel writes integers
        return result
    if cell.prune is None:
        result.append(Variant("gptqmodel"))
    if cell.prune is None and method == "gptq":
        result.append(Variant("gptqmodel", "mse", {"quantize_config": {"mse": 2.4}}))
        activation_order = {"desc_act": True, "act_group_aware": False, "mse": 2.4}
        result.append(Variant("gptqmodel", "desc_act+mse", {"quantize_config": activation_order}))
    if cell.prune is None and method == "rtn":
        result.append(Variant("gptqmodel", "mse", {"smooth": "mse"}))
    return result


BEST_CELLS = ("gptq-w4-g128", "gptq-w3-g128", "gptq-w2-g64")


def best_variants(cell: Cell) -> list[Variant]:
    """GPTQ and what each tool offers beyond it for the grid of a cell, at the settings that its documentation recommends."""
    assert cell.quantize is not None
    longer: dict[str, Any] = {"iters": 1000}
    codes: list[Variant] = []
    if cell.quantize["bits"] == 2:
        longer["enable_alg_ext"] = True  # SignRoundV2, which AutoRound recommends for 2 bits
        trellis = {"scheme": {"representation": "trellis", "group_size": cell.quantize["group_size"]}}  # as many bits
        codes = [Variant("ours", "trellis", trellis), Variant("ours", "trellis best", {**trellis, "quality": "best"})]
    return [
        Variant("ours"),
        Variant("ours", "best", {"quality": "best"}),
        *codes,
        Variant("gptqmodel", "mse", {"quantize_config": {"mse": 2.4}}),
        Variant("gptqmodel", "gptaq", {"quantize_config": {"gptaq": {}, "mse": 2.4}}),
        Variant("gptqmodel", "foem", {"quantize_config": {"foem": {}, "mse": 2.4}}),
        Variant("autoround"),
        Variant("autoround", "best", longer),
    ]


def recipe(cell: Cell, settings: dict[str, Any], model: str, samples: int, length: int, seed: int) -> dict[str, Any]:
    """Our recipe for a cell; what `settings` does not name stays at its default, as for the peers."""
    stages: list[dict[str, Any]] = []
    if cell.prune:
        pattern = cell.prune["pattern"]
        sparsity = {"sparsity": cell.prune["sparsity"]} if pattern == "unstructured" else {}
        stages.append(
            {"prune": {"method": cell.prune["method"], "pattern": pattern, **sparsity, "ignore": ["lm_head"]}}
        )
    if cell.quantize:
        given = {"method": cell.quantize["method"]} if isinstance(settings.get("scheme"), dict) else cell.quantize
        stages.append({"quantize": {**given, **settings, "ignore": ["lm_head"]}})
    return {
        "name": "cell",
        "model": model,
        "calibration": {"data": "bundled", "samples": samples, "sequence_length": length, "seed": seed},
        "stages": stages,
    }
