"""Where the time of a round goes, as `methods/round_profile.py` finds it."""

from __future__ import annotations

from dataclasses import dataclass

TARGET, PYTHON = "target forward", "Python"
PARTS = (
    "context update", "roll-out", "head", "injector", "n-grams", "tree building", "mask", TARGET, "verification",
    "commit", PYTHON,
)  # fmt: skip
DEFINITIONS = {
    "profile": "milliseconds of a round by part; the parts add up to the round. These rounds are slower than those of "
    "the table, because the interpreter reports each function and, on a GPU, every part is waited for",
    "limit": "tau x t(1) / t(n): the speed-up of the same tau if all but the target's forward were free. tau: tokens a "
    "round, the prompt's forward left out; t(1): a forward over one token; t(n): the forward that verifies n nodes, "
    "the root included, n as in the mean round; medians over copies of one cache",
    "reached": "the table's speed-up after the first token, measured without timers, over the limit",
}


@dataclass(frozen=True)
class Profile:
    """Measurements of the rounds of one system; means are over its rounds."""

    rounds: int
    round_ms: float  # mean milliseconds of a round
    parts: dict[str, float]  # mean milliseconds of each part; they sum to `round_ms`
    tau: float  # mean tokens a round
    nodes: float  # mean nodes verified in a round, the root included
    timed_nodes: int | None  # number n of nodes of the repeated forward; `None` if no forward could be repeated
    forward_one_ms: float | None  # t(1), milliseconds of a forward over one token; `None` as above
    forward_nodes_ms: float | None  # t(n), milliseconds of the repeated forward; `None` as above
    decode_speed_up: float | None = None  # measured without timers; `None` if not measured

    @property
    def limit(self) -> float | None:
        """Speed-up of the same tau if all but the target's forward were free; `None` if unknown."""
        if self.forward_one_ms is None or self.forward_nodes_ms is None:
            return None
        return self.tau * self.forward_one_ms / self.forward_nodes_ms

    @property
    def reached(self) -> float | None:
        """Share of the limit that was reached, 0 to 1; `None` if unknown."""
        limit = self.limit
        return None if limit is None or self.decode_speed_up is None else self.decode_speed_up / limit
