"""Two trees of guesses as one, with chances that stay chances."""

from __future__ import annotations

from runtime.sampling.tree import ROOT, Tree


def join(first: Tree, more: Tree, nodes: int) -> list[tuple[int, float]]:
    """Add to `first` what of `more` it does not have, up to so many nodes in all. Both have chances.

    What comes beside other tokens can only be right where they are not: its chance is the part of its own that they leave.

    Returns:
        Of each node that was added, in order, its index in `more` and that part.
    """
    known = {}
    left: dict[int, float] = {}
    for node, (parent, token) in enumerate(zip(first.parents, first.tokens, strict=True)):
        known[parent, token] = node
        left[parent] = left.get(parent, 1.0) - first.chances[node]
    place = {ROOT: ROOT}
    added = []
    for node, (parent, token) in enumerate(zip(more.parents, more.tokens, strict=True)):
        above = place.get(parent)
        if above is None:
            continue
        if (above, token) in known:
            place[node] = known[above, token]
        elif len(first) < nodes:
            part = max(0.0, left.get(above, 1.0))
            place[node] = first.add(token, above, part * more.chances[node])
            added.append((node, part))
    return added
