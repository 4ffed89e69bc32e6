"""What an emulated device has drawn: by use, by part, and how long it was in each state.

Between two changes of conditions the power is constant, so the sums are exact however rarely they are made.
"""

REQUESTS, OVERHEAD, IDLE = "requests", "overhead", "idle"
STATES = ("active", "warm", "sleeping", "cold", "off")
Parts = tuple[float, float, float, float, float]
"""Of a power or an energy, by what it is for: floor, context, SM clock, HBM, compute."""


class Meter:
    """Sums of power over time; conditions are what `set` said last, and sums are up to `since_ms`."""

    def __init__(self) -> None:
        self.since_ms = 0.0
        self.power_w = 0.0
        self.use = IDLE
        self.state = "sleeping"
        self._parts_w: Parts = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._parts_j: Parts = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._energy_j = 0.0
        self._uses_j = {REQUESTS: 0.0, OVERHEAD: 0.0, IDLE: 0.0}
        self._state_ms = dict.fromkeys(STATES, 0.0)

    def set(self, use: str, state: str, parts_w: Parts) -> None:
        """Note what the device does from now on, which is `since_ms`."""
        self.use, self.state, self._parts_w = use, state, parts_w
        self.power_w = sum(parts_w)

    def pass_to(self, now_ms: float) -> float:
        """Sum up to now; returns the seconds that have passed since the last time."""
        passed_ms = now_ms - self.since_ms
        seconds = passed_ms / 1000
        self._parts_j, self.since_ms = self.parts_j(now_ms), now_ms
        self._state_ms[self.state] += passed_ms
        self._energy_j += self.power_w * seconds
        self._uses_j[self.use] += self.power_w * seconds
        return seconds

    def charge(self, energy_j: float) -> None:
        """Add the energy of memory traffic beside that of steps: overhead."""
        floor, context, clock, hbm, compute = self._parts_j
        self._parts_j = (floor, context, clock, hbm + energy_j, compute)
        self._energy_j += energy_j
        self._uses_j[OVERHEAD] += energy_j

    def write_off(self, energy_j: float) -> None:
        """Move energy from requests to overhead: what it was spent on was aborted."""
        self._uses_j[REQUESTS] -= energy_j
        self._uses_j[OVERHEAD] += energy_j

    def energy_j(self, now_ms: float) -> float:
        """Joules since the beginning; the sum of the three uses, and of the five parts."""
        return self._energy_j + self.power_w * (now_ms - self.since_ms) / 1000

    def used_j(self, use: str, now_ms: float) -> float:
        """Joules that went to a use."""
        since_j = self.power_w * (now_ms - self.since_ms) / 1000 if use == self.use else 0.0
        return self._uses_j[use] + since_j

    def parts_j(self, now_ms: float) -> Parts:
        """Joules by what they were for."""
        seconds = (now_ms - self.since_ms) / 1000
        a, b, c, d, e = self._parts_j
        a_w, b_w, c_w, d_w, e_w = self._parts_w
        return (
            a + a_w * seconds,
            b + b_w * seconds,
            c + c_w * seconds,
            d + d_w * seconds,
            e + e_w * seconds,
        )

    def state_ms(self, now_ms: float) -> tuple[float, ...]:
        """Time spent in each of `STATES`."""
        passed_ms = now_ms - self.since_ms
        return tuple(ms + (passed_ms if s == self.state else 0.0) for s, ms in self._state_ms.items())
