"""Acceptance rules: what of a drafted tree becomes text."""

from __future__ import annotations

from typing import Any

from runtime.drafting.verify.base import Rule


def read_rule(value: Any, where: str = "acceptance") -> Rule:
    """A rule from a name or {name: settings}; RequestError where there is none such."""
    from runtime.config.fields import PolicyError
    from runtime.drafting.config.registry import RULES, read_method

    try:
        rule: Rule = read_method(RULES, value)
    except PolicyError as error:
        raise error.at(where) from None
    return rule
