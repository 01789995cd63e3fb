"""How many steps are asked for in one answer, and how long its silence is borne.

Slow start, as TCP's (Jacobson, "Congestion Avoidance and Control", 1988), and for its reason: nobody knows
what lies between. A proxy may hold an answer back until it is whole. One that reaches to the end of the epoch
would come when all of it is packed, or never, and fill the proxy's memory. So answers are short at first and
grow while they come at once, and shrink where they let wait. A request costs the service some milliseconds,
so where nothing went wrong yet they grow fast; behind a fault they double.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_STEPS = 64
_MOST_STEPS = 1 << 30
_SOON_S = 1.0
_FAST = 16  # times as many, while nothing went wrong


@dataclass(slots=True, kw_only=True)
class Portion:
    """What the next request of a stream asks for. One a transport.

    silence_s: after so long without a byte an answer is given up. Twice as long after each that was, up to
        longest_s, until answers come soon again: it may be one step that takes so long.
    """

    silence_s: float = 60.0
    longest_s: float = 300.0
    num_steps: int = _FIRST_STEPS
    num_silent: int = 0  # answers given up since one came soon
    growth: int = _FAST

    @property
    def patience_s(self) -> float:
        """Silence that is borne now."""
        return min(2.0**self.num_silent * self.silence_s, max(self.silence_s, self.longest_s))

    def came(self, waited_s: float) -> None:
        """An answer came to its end; its first pack `waited_s` after the request. Where that was long, the
        answer was held back or its packs are still being made, and a shorter one would have come sooner."""
        soon_s = min(_SOON_S, self.silence_s / 8)
        if waited_s < self.silence_s / 2:
            self.num_silent = 0
        if waited_s < soon_s:
            self.num_steps = min(self.growth * self.num_steps, _MOST_STEPS)
        elif waited_s > 2 * soon_s:
            self.num_steps = max(1, int(self.num_steps * soon_s / waited_s))

    def fell_silent(self) -> None:
        """An answer was given up."""
        self.num_steps, self.num_silent, self.growth = 1, self.num_silent + 1, 2

    def only_waits(self) -> None:
        """The answer that was given up had nothing to bring yet: that says nothing of the way."""
        self.num_silent = 0

    def brought_nothing(self) -> None:
        """An answer ended in a fault before its first pack: it may be what does not fit into a proxy."""
        self.num_steps, self.growth = 1, 2
