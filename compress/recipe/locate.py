"""Where the model of a recipe is: a directory, or a hub id that is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from compress.nearest import nearest
from compress.recipe.models import Recipe
from runtime.errors import RequestError

_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?\Z")
_NEEDED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate_model(recipe: Recipe) -> Path:
    """The directory of the recipe's checkpoint; a hub id is downloaded into the Hugging Face cache.

    Raises:
        RequestError: neither a directory nor a model on the hub, with the nearest name beside it.
    """
    name = recipe.model
    written = Path(name).expanduser()
    tried = [written] if written.is_absolute() else [base / written for base in recipe.search_directories("model")]
    for candidate in tried:
        if candidate.is_dir():
            return candidate
        if candidate.is_file():
            raise RequestError(
                recipe.at("model", f"{candidate} is a file; a model is a directory with config.json and safetensors")
            )
    missing = _missing_path(name, tried)
    if missing is not None:
        raise RequestError(recipe.at("model", missing))
    return _download(recipe, name)


def _missing_path(name: str, tried: list[Path]) -> str | None:
    """The sentence for a name that can only be a path; None when it may be a hub id."""
    for candidate in tried:
        if candidate.parent.is_dir() and (candidate.parent != Path() or "/" in name):
            found = nearest(candidate.name, (entry.name for entry in candidate.parent.iterdir() if entry.is_dir()))
            if found:
                return f"no model '{name}'; did you mean '{candidate.parent / found}'?"
    looks_like_path = _HUB_ID.match(name) is None or name.startswith((".", "/", "~"))
    if looks_like_path or any((candidate.parent).is_dir() and "/" in name for candidate in tried):
        return f"no directory '{name}' (looked for {' and '.join(str(path) for path in dict.fromkeys(tried))})"
    return None


def _download(recipe: Recipe, name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_NEEDED_FILES))
    except GatedRepoError:
        reason = f"'{name}' is gated on the Hugging Face hub; ask for access there and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = f"'{name}' is neither a directory here nor a model on the Hugging Face hub"
    except LocalEntryNotFoundError:
        reason = f"'{name}' is no directory here, and the Hugging Face hub cannot be reached to look for it there"
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines()
        reason = (
            f"'{name}' is no directory here, and could not be downloaded: {lines[0] if lines else type(error).__name__}"
        )
    raise RequestError(recipe.at("model", reason))
