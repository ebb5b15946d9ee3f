"""How many users there are at each moment of a load test: plain data, chosen with --scenario.

Each scenario is a list of (until, users, spawn rate) stages, `until` in shares of the run time; locustfile.py follows
them. What a user does is in locustfile.py.
"""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """`users` until `until` of the run time has passed, started or stopped at `spawn_rate` a second."""

    until: float
    users: int
    spawn_rate: float


SCENARIOS: dict[str, tuple[Stage, ...]] = {
    "steady": (Stage(1.0, 8, 4),),
    "burst": (Stage(0.2, 2, 2), Stage(0.4, 40, 40), Stage(0.6, 2, 40), Stage(0.8, 40, 40), Stage(1.0, 2, 40)),
    "disconnect": (Stage(1.0, 16, 8),),
}


def stage(scenario: str, share: float) -> Stage | None:
    """The stage at `share` of the run time; None when the run is over."""
    return next((stage for stage in SCENARIOS[scenario] if share < stage.until), None)
