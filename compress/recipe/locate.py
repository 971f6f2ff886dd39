"""Location of a recipe's model: a directory, or a hub id that is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from compress.core.resources import recipes_directory
from compress.recipe.models import Recipe
from compress.recipe.origin import Origin, nearest_path
from compress.recipe.yaml_source import Path as KeyPath
from runtime.errors import RequestError

_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?\Z")
_NEEDED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def locate_model(recipe: Recipe) -> Path:
    """The directory of the recipe's checkpoint; see `locate_checkpoint`."""
    return locate_checkpoint(recipe.model, recipe.origin, ("model",))


def locate_checkpoint(name: str, origin: Origin, path: KeyPath) -> Path:
    """The directory of a checkpoint; a hub id is downloaded into the Hugging Face cache.

    Args:
        name: what is written at the key `path` of a recipe.

    Raises:
        RequestError: neither a directory nor a model on the hub; the sentence has the nearest name.
    """
    written = Path(name).expanduser()
    tried = origin.candidates(path, name)
    bundled = recipes_directory() / written
    for candidate in tried:
        if candidate.is_dir():
            return candidate
        if candidate.exists():
            text = f"{candidate} is a file; a model is a directory with config.json and safetensors"
            raise RequestError(origin.at(path, text))
    if written.parts[:1] == ("checkpoints",) and bundled.is_dir():
        return bundled  # a bundled recipe that was copied to another place means the same model
    meant = nearest_path(tried, Path.is_dir)
    hint = "" if meant is None else f"; did you mean '{meant}'?"
    parents = [candidate.parent for candidate in tried if "/" in name and candidate.parent.is_dir()]
    if parents or _HUB_ID.match(name) is None or name.startswith((".", "~")):
        # `checkpoints/stdlib-4n` could be a hub id too, but beside a directory `checkpoints` it is a misspelled path.
        places = " and ".join(dict.fromkeys(map(str, tried)))
        raise RequestError(origin.at(path, f"no directory '{name}'{hint or f' (looked for {places})'}"))
    try:
        return _download(name)
    except RequestError as error:
        raise RequestError(origin.at(path, f"{error}{hint}")) from None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_NEEDED_FILES))
    except GatedRepoError:
        reason = f"'{name}' is gated on the Hugging Face hub; ask for access there and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = f"'{name}' is neither a directory here nor a model on the Hugging Face hub"
    except LocalEntryNotFoundError:
        reason = f"there is no directory '{name}', and the Hugging Face hub cannot be reached to look for it there"
    except (OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"there is no directory '{name}', and it cannot be downloaded: {first}"
    raise RequestError(reason)
