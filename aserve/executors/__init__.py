"""Where a step runs. The engine knows an executor only by this Protocol; thread.py is the default."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from aserve.plan import StepPlan, StepResult, WorkerInfo


class Executor(Protocol):
    """Runs plans in the order submitted. After a failure every in-flight and later call raises EngineDeadError;
    a plan that fails without harming the worker raises StepError and later plans run."""

    async def start(self) -> WorkerInfo:
        """Loads the model and sizes the pools. Raises ConfigError or the loader's error; leaves nothing behind."""
        ...

    def submit(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Queues a plan and returns at once; awaiting gives its result. Call from the event loop."""
        ...

    async def stop(self) -> None:
        """Lets submitted plans finish, then frees the model. Idempotent."""
        ...


class StepError(Exception):
    """One step failed and the worker can go on. `slots` are the culprits where known; `memory` says that it needed
    more memory than there is."""

    def __init__(self, message: str, slots: tuple[int, ...] = (), *, memory: bool = False) -> None:
        super().__init__(message)
        self.slots = slots
        self.memory = memory


class Runner(Protocol):
    """The model thread's side: everything here is called on one thread, in order, except `wait`."""

    def load(self) -> WorkerInfo:
        """Loads weights, profiles, allocates the KV pools."""
        ...

    def launch(self, plan: StepPlan) -> object:
        """Starts a step and returns a handle; on CPU the work is done when it returns. Raises StepError."""
        ...

    def wait(self, handle: object) -> StepResult:
        """Blocks, without the GIL on CUDA, until the step's draws are on the host. Called on the waiting thread."""
        ...

    def idle(self) -> bool:
        """Does one short piece of work that can wait, with no step in flight; False where there is none."""
        ...

    def close(self) -> None:
        """Frees the model and the pools."""
        ...
