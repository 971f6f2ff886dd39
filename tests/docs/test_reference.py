"""The generated reference: a page or row for every recipe key, method and command."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from compress.cli import COMMANDS
from compress.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(hooks: ModuleType) -> dict[str, str]:
    found: dict[str, str] = hooks.pages()
    return found


def test_every_recipe_key_is_described(pages: dict[str, str]) -> None:
    rows = [line.split("|") for line in pages["reference/recipe.md"].splitlines() if line.startswith("| `")]
    assert set(Recipe.model_fields) <= {row[1].strip(" `") for row in rows}
    for row in rows:
        assert row[4].strip(), f"{row[1]} has no description"


def test_every_method_is_described(pages: dict[str, str]) -> None:
    quantize = pages["reference/methods/quantize.md"]
    assert all(f"## {name}\n" in quantize for name in ("rtn", "gptq", "awq", "smoothquant"))
    assert "| `group_size` |" in quantize
    assert "snapkv" in pages["reference/methods/kv_cache.md"]


def test_every_command_and_option_is_described(pages: dict[str, str]) -> None:
    assert {f"reference/commands/{name}.md" for name in COMMANDS} <= set(pages)
    assert "`--max-memory`" in pages["reference/commands/apply.md"]
    assert "compress recipes show" in pages["reference/commands/recipes.md"]


def test_the_navigation_names_every_generated_page(pages: dict[str, str]) -> None:
    class Loader(yaml.SafeLoader):
        """Takes the tags that MkDocs knows."""

    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    named: set[str] = set()

    def walk(item: object) -> None:
        if isinstance(item, str):
            named.add(item)
        elif isinstance(item, dict):
            for below in item.values():
                walk(below)
        elif isinstance(item, list):
            for below in item:
                walk(below)

    walk(navigation)
    stored = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert named == set(pages) | stored
