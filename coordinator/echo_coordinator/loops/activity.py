"""What the trainer does or waits for, since when, and how its time was spent. Pure; times are monotonic seconds."""

from dataclasses import dataclass, field

from echo_coordinator.state.batch import WaitState
from echo_swarm.status import Activity

TRAINING = "training"
PUBLISHING = "publishing"


@dataclass(slots=True)
class TrainerActivity:
    """The trainer's present state and the account of its time since the first batch was ready."""

    since: float
    """When the present state began."""
    state: str = "starting"
    detail: str = "loading the model"
    normal: bool = True
    busy_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict[str, float])
    """By cause; while publishing it waits for `publishing`."""
    counting: bool = False
    """False until the first batch: start-up is not waiting."""
    _entered: float = 0.0

    def work(self, now: float, detail: str) -> None:
        """An update has begun."""
        self._account(now)
        self.counting = True
        self._enter(TRAINING, detail, True, now)

    def publish(self, now: float, detail: str) -> None:
        """A version is being published."""
        self._account(now)
        self._enter(PUBLISHING, detail, True, now)

    def wait(self, waiting: WaitState, now: float) -> None:
        """There is no batch, for this reason."""
        self._account(now)
        self._enter(waiting.reason.value, waiting.detail, waiting.normal, waiting.since)
        self._entered = now

    def say(self, state: str, detail: str, now: float, *, normal: bool = True) -> None:
        """Something else: starting, restarting after a failure, finished."""
        self._account(now)
        self._enter(state, detail, normal, now)

    def busy_share(self, now: float) -> float:
        """Return the share of time in which the trainer worked, since its first batch."""
        busy, waited = self.busy_s, sum(self.waited_s.values())
        if self.counting:
            spent = now - self._entered
            busy, waited = (busy + spent, waited) if self.state == TRAINING else (busy, waited + spent)
        return busy / (busy + waited) if busy + waited > 0 else 0.0

    def report(self, now: float) -> Activity:
        """Return the present state for status."""
        return Activity(state=self.state, detail=self.detail, since_s=max(0.0, now - self.since), normal=self.normal)

    def _enter(self, state: str, detail: str, normal: bool, since: float) -> None:
        self.since = self.since if state == self.state and state not in (TRAINING, PUBLISHING) else since
        self.state, self.detail, self.normal = state, detail, normal

    def _account(self, now: float) -> None:
        if self.counting:
            spent = now - self._entered
            if self.state == TRAINING:
                self.busy_s += spent
            else:
                self.waited_s[self.state] = self.waited_s.get(self.state, 0.0) + spent
        self._entered = now

    def stop(self, now: float) -> None:
        """The account ends: training is over."""
        self._account(now)
        self.counting = False
