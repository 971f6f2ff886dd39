"""How far what was promised of drafting came true."""

from __future__ import annotations

_PRIOR = 24.0  # tokens that were promised and came, before anything was
_FORGETS = 0.98  # at each promise
_MORE, _LESS = 3.0, 8.0  # times more or less than was promised that a step counts for: a machine may stop for seconds
_RECOVERS = 0.1  # of what was lost, at a probe
_FIRST_WAIT, _LONGEST_WAIT = 32, 512  # steps
_STEADY = 64  # promises


class Trust:
    """Tokens that came as a share of those that were promised for the same time.

    Sums and not an average of shares: a step writes one token or five, and of so noisy a number an average that cannot pass 1 would
    always be too low.
    """

    def __init__(self) -> None:
        self._promised = self._kept = _PRIOR
        self._waited = self._tried = 0
        self._wait = _FIRST_WAIT

    @property
    def value(self) -> float:
        """At most 1."""
        return min(1.0, self._kept / self._promised)

    def add(self, promised: float, kept: float) -> None:
        """So many tokens were promised for a step, and so many came."""
        promised = min(promised, _LESS * kept)
        self._promised = _FORGETS * self._promised + promised
        self._kept = _FORGETS * self._kept + min(kept, _MORE * promised)

    def recover(self) -> None:
        """What is not tried any more cannot earn it."""
        self._kept += _RECOVERS * (self._promised - self._kept)

    def wait(self, steps: int) -> None:
        """For so many steps nothing will be promised, and nothing refused."""
        self._waited += steps

    def allows(self, promised: float, needed: float) -> bool:
        """Whether a promise of so many tokens a second is still more than is needed, as such promises were kept.

        Where they were not, trust comes back after a number of such refusals, which doubles until it is kept for a while.
        """
        if promised * self.value > needed:
            self._tried += 1
            if self._tried >= _STEADY:
                self._wait = _FIRST_WAIT
            return True
        self._tried = 0
        self._waited += 1
        if self._waited >= self._wait:
            self._waited, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
            self.recover()
        return False
