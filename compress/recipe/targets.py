"""Targets of a stage: class names, exact names, globs and `re:` expressions."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.config.messages import did_you_mean, listing
from runtime.errors import RequestError

HEAD = "lm_head"
DEFAULT_IGNORE = (HEAD,)


@dataclass(frozen=True)
class ModuleInfo:
    """A module that holds a weight matrix.

    Attributes:
        name: its dotted name in the model, such as `model.layers.0.mlp.down_proj`.
        class_name: its class, such as `Linear`.
        shape: `(out, in)` of the weight, as a linear layer sees it.
        router: it chooses or weighs experts, which low precision would send tokens to others by; only a target that names it means it.
        head: it is the model's output head, which `lm_head` means whatever the model calls it.
    """

    name: str
    class_name: str
    shape: tuple[int, int]
    router: bool = False
    head: bool = False


@functools.lru_cache(maxsize=512)
def _expression(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:])
        except re.error as error:
            raise RequestError(f"'{pattern}' is not a regular expression: {error}") from None
    return re.compile(fnmatch.translate(pattern))


def check_pattern(pattern: str) -> None:
    """Raise `RequestError` when `pattern` is a `re:` expression that does not compile, or empty."""
    if not pattern or pattern == "re:":
        raise RequestError("an empty target matches nothing; give a class name, a module name, a glob or re:EXPRESSION")
    _expression(pattern)


def matches(pattern: str, module: ModuleInfo) -> bool:
    """Whether `pattern` means `module`.

    `re:` expressions match from the start of the name (as in compressed-tensors); globs match the whole name, and their
    `*` crosses dots; anything else is a class name, or a whole name, or its last part (`lm_head`, `down_proj`).
    """
    if pattern.startswith("re:") or any(sign in pattern for sign in "*?["):
        return _expression(pattern).match(module.name) is not None
    if module.head and pattern == HEAD:
        return True
    return pattern in (module.class_name, module.name) or module.name.endswith(f".{pattern}")


def select(
    modules: Sequence[ModuleInfo], targets: Sequence[str], ignore: Sequence[str], ignore_is_default: bool = False
) -> list[ModuleInfo]:
    """The modules that some target matches and no `ignore` entry does, in model order.

    With `ignore_is_default` an entry of `ignore` that is itself among the targets does not count: whoever writes
    `targets: [lm_head]` means it, although `lm_head` is ignored by default.
    """
    if ignore_is_default:
        ignore = [pattern for pattern in ignore if pattern not in targets]
    return [
        module
        for module in modules
        if any(matches(pattern, module) and (not module.router or pattern != module.class_name) for pattern in targets)
        and not any(matches(pattern, module) for pattern in ignore)
    ]


def unmatched_message(targets: Sequence[str], ignore: Sequence[str], modules: Sequence[ModuleInfo]) -> str:
    """Why nothing was selected, with the nearest names the model does have."""
    classes = sorted({module.class_name for module in modules})
    hit = [pattern for pattern in targets if any(matches(pattern, module) for module in modules)]
    if hit:
        return f"the targets {listing(hit)} match only modules that 'ignore' ({listing(ignore)}) takes away"
    last_parts = dict.fromkeys(module.name.rsplit(".", 1)[-1] for module in modules)
    names = [*classes, *last_parts, *(module.name for module in modules)]
    word = targets[0] if targets else ""
    plain = word.removeprefix("re:").strip("^$*.\\")
    hint = did_you_mean(plain, names) if plain else ""
    what = f"'{word}' matches" if len(targets) == 1 else f"{listing(repr(target) for target in targets)} match"
    return f"{what} no module of the model{hint or '.'} Classes: {listing(classes)}. Modules: {listing(last_parts, 12)}"
