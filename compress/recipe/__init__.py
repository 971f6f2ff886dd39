"""Recipes: what to compress, how, and how well. `load` reads one; `Recipe` is the validated result."""

from compress.recipe.locate import locate_checkpoint, locate_model
from compress.recipe.models import CalibrationConfig, EvaluateConfig, Recipe, TextSource
from compress.recipe.origin import Origin
from compress.recipe.reading import find_recipe, load
from compress.recipe.stages import KINDS, Stage, StageKind

__all__ = [
    "KINDS",
    "CalibrationConfig",
    "EvaluateConfig",
    "Origin",
    "Recipe",
    "Stage",
    "StageKind",
    "TextSource",
    "find_recipe",
    "load",
    "locate_checkpoint",
    "locate_model",
]
