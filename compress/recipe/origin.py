"""Origin of a recipe's value: file and line, or the `--set` that gave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compress.recipe.yaml_source import Path as KeyPath
from compress.recipe.yaml_source import dotted
from runtime.config.messages import nearest
from runtime.errors import RequestError


@dataclass
class Origin:
    """Looks up the place of a key.

    Attributes:
        file: the recipe file as the user named it; None for a recipe given as a dictionary.
        lines: 1-based line of each key path.
        overrides: text of the `--set` (or option) that gave the value at a key path.
    """

    file: Path | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def override_of(self, path: KeyPath) -> str | None:
        """The override that gave this key (or a mapping around it), or None."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
        return None

    def place(self, path: KeyPath) -> str:
        """`recipes/x.yaml:12`, `--set a.b=1`, or `recipe`; the enclosing key's place when the key itself is absent."""
        override = self.override_of(path)
        if override is not None:
            return override
        below = next((text for given, text in self.overrides.items() if given[: len(path)] == path), None)
        if path and path not in self.lines and below is not None:
            return below
        if self.file is None:
            return "recipe"
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.file}:{self.lines[path[:length]]}"
        return str(self.file)

    def at(self, path: KeyPath, message: str) -> str:
        """A whole sentence: place, key, message."""
        place = self.place(path)
        return f"{place}: {dotted(path)}: {message}" if path else f"{place}: {message}"

    @contextmanager
    def located(self, path: KeyPath) -> Iterator[None]:
        """Errors of the request that are raised inside begin with the place and key."""
        try:
            yield
        except RequestError as error:
            raise RequestError(self.at(path, str(error))) from None

    def search_directories(self, path: KeyPath) -> tuple[Path, ...]:
        """Where a relative file name at `path` is looked up: beside the recipe, then in the working directory.

        A value typed on the command line is looked up the other way round.
        """
        here = Path()
        if self.file is None:
            return (here,)
        beside = self.file.parent
        return (here, beside) if self.override_of(path) is not None else (beside, here)

    def candidates(self, path: KeyPath, name: str) -> list[Path]:
        """The files or directories that a name written at `path` may mean, the likeliest first."""
        written = Path(name).expanduser()
        return [written] if written.is_absolute() else [base / written for base in self.search_directories(path)]


def nearest_path(tried: Iterable[Path], fits: Callable[[Path], bool]) -> Path | None:
    """The entry that was probably meant by one of several paths that are not there; `fits` says which entries count."""
    for path in tried:
        if path.parent.is_dir():
            found = nearest(path.name, (entry.name for entry in path.parent.iterdir() if fits(entry)))
            if found:
                return path.parent / found
    return None
