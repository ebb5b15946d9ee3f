"""Who made a step fail, where the model thread cannot say: requests of a failed step come back one at a time.

results.py asks who ends when a step fails, scheduler.py who may come in after that. The request that comes in while a
step fails again is the culprit, and ends alone; one that draws twice without harm is cleared. Nothing new is admitted
meanwhile, so that nobody is blamed for another.
"""

from __future__ import annotations

from aserve.request import Request

MAX_ACCUSED = 3  # failed steps without a culprit that a request may have been part of
NUM_DRAWS = 2  # that clear a suspect: one of its recomputed tokens, one of a decode


class Quarantine:
    """Requests under suspicion. Empty but after a failed step."""

    def __init__(self) -> None:
        self._suspects: dict[Request, None] = {}
        self._accused: dict[Request, int] = {}  # how often; kept until the request ends
        self._num_draws = 0  # of the one on trial
        self.on_trial: Request | None = None

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def accuse(self, requests: list[Request]) -> list[Request]:
        """The step of these requests failed. Returns those that end for it; the others are to be tried."""
        if self.on_trial in requests:
            return [self.on_trial] if self.on_trial is not None else []
        for request in requests:
            self._accused[request] = self._accused.get(request, 0) + 1
        if len(requests) == 1:
            return requests
        self._suspects.update(dict.fromkeys(requests))
        return [request for request in requests if self._accused[request] > MAX_ACCUSED]

    def admits(self, request: Request) -> bool:
        """False while another is on trial, and for what was not in the failed step."""
        if not self._suspects:
            return True
        return request in self._suspects and self.on_trial in (None, request)

    def enter(self, request: Request) -> None:
        """The request comes in."""
        if request in self._suspects:
            self.on_trial, self._num_draws = request, 0

    def drew(self) -> None:
        """A step with a draw of the one on trial went well."""
        self._num_draws += 1
        if self._num_draws == NUM_DRAWS and self.on_trial is not None:
            self._suspects.pop(self.on_trial, None)
            self.on_trial = None

    def excuse(self, request: Request) -> None:
        """The request stays away for now: nobody waits for its trial."""
        self._suspects.pop(request, None)
        if self.on_trial is request:
            self.on_trial = None

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.excuse(request)
        self._accused.pop(request, None)
