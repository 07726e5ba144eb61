"""How much of the trainer's time audits may take. Pure; times are monotonic seconds.

A bucket: it fills by `share` of the time that passes, up to `burst_s`, and each audit empties it by what it took. An
audit that is begun is finished, so that the level may go below 0; the next one waits until it is above.
"""

from echo_coordinator.state.audit_settings import AuditSettings


class AuditBudget:
    """The bucket, and the account of what audits took."""

    def __init__(self, settings: AuditSettings, now: float) -> None:
        self._settings = settings
        self._level, self._at = settings.burst_s, now
        self.began = now
        self.charged_s = 0.0
        """While a batch waited."""
        self.free_s = 0.0
        """While the trainer had nothing else to do."""

    def allows(self, now: float) -> bool:
        """Whether an audit may begin while a batch waits."""
        return self._settings.share > 0 and self._filled(now) > 0

    def spend(self, seconds: float, now: float, *, free: bool) -> None:
        """Note an audit that has ended at `now`."""
        if free:
            self.free_s += seconds
            return
        self.charged_s += seconds
        self._level, self._at = self._filled(now) - seconds, now

    def share_spent(self, now: float) -> float:
        """Return the share of all time that audits kept batches waiting."""
        return self.charged_s / max(1.0, now - self.began)

    def _filled(self, now: float) -> float:
        return min(self._settings.burst_s, self._level + self._settings.share * (now - self._at))
