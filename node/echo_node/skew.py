"""When a person is told that this machine's clock is wrong, by what each hello measures. Pure."""

WARNING_S = 3.0
"""The directory refuses records beyond a few seconds."""


class Skew:
    """What was told of the clock so far."""

    def __init__(self) -> None:
        self._told_s = 0.0
        self._doubt_s = 0.0

    def news(self, skew_s: float, *, doubt_s: float) -> str:
        """Return a line for a person when the clock is wrong, when that has changed and when it is right again.

        A hello that took a minute leaves half a minute's doubt: when in it the coordinator looked at its clock. What
        the next hello finds is no news if that explains it.

        Args:
            skew_s: our clock minus the coordinator's.
            doubt_s: by how much that may be off.

        """
        wrong = abs(skew_s) > WARNING_S + doubt_s
        changed = abs(skew_s - self._told_s) > WARNING_S + doubt_s + self._doubt_s
        if changed or (wrong and doubt_s < self._doubt_s):
            self._told_s, self._doubt_s = (skew_s, doubt_s) if wrong else (0.0, 0.0)
        if not changed:
            return ""
        if not wrong:
            return "this machine's clock agrees with the coordinator's again"
        return (
            f"warning: this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the "
            "coordinator's; set it by NTP, or other peers will ignore what this node announces. Its work counts "
            "all the same"
        )
