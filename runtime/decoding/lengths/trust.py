"""How far what was promised of drafting came true."""

from __future__ import annotations

_PRIOR = 24.0  # tokens that were promised and came, before anything was
_FORGETS = 0.98  # at each promise
_MOST = 3.0  # times what was promised that a step counts for
_RECOVERS = 0.1  # of what was lost, at a probe


class Trust:
    """Tokens that came as a share of those that were promised for the same time.

    Sums and not an average of shares: a step writes one token or five, and of so noisy a number an average that cannot pass 1 would
    always be too low.
    """

    def __init__(self) -> None:
        self._promised = self._kept = _PRIOR

    @property
    def value(self) -> float:
        """At most 1."""
        return min(1.0, self._kept / self._promised)

    def add(self, promised: float, kept: float) -> None:
        """So many tokens were promised for a step, and so many came."""
        self._promised = _FORGETS * self._promised + promised
        self._kept = _FORGETS * self._kept + min(kept, _MOST * promised)

    def recover(self, share: float = _RECOVERS) -> None:
        """What is not tried any more cannot earn it: that share of what was lost comes back."""
        self._kept += share * (self._promised - self._kept)
