"""Resources of the package: ready recipes, the bundled checkpoint and its texts."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import CompressError


def recipes_directory() -> Path:
    """The `recipes` directory: beside the package in a source checkout, inside it (`compress/_recipes`) when installed.

    Raises:
        CompressError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    installed, checkout = package / "_recipes", package.parent / "recipes"
    for candidate in (installed, checkout):
        if (candidate / "checkpoints").is_dir():
            return candidate
    raise CompressError(
        f"the bundled recipes are missing: neither {installed} nor {checkout} is there; reinstall compress"
    )


def is_bundled(checkpoint: Path) -> bool:
    """Whether a checkpoint is one of the package's, which read its texts."""
    return (recipes_directory() / "checkpoints").resolve() in checkpoint.resolve().parents


def bundled_recipes() -> dict[str, Path]:
    """File of every bundled recipe by its name."""
    return {path.stem: path for path in sorted(recipes_directory().glob("*.yaml"))}


def bundled_sweeps() -> dict[str, Path]:
    """File of every bundled sweep by its name."""
    return {path.stem: path for path in sorted((recipes_directory() / "sweeps").glob("*.yaml"))}


def bundled_text(name: str) -> Path:
    """File of a bundled text: `calibration` or `heldout`."""
    return recipes_directory() / "checkpoints" / "texts" / f"{name}.txt"
