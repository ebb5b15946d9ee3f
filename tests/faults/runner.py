"""A fake model that goes wrong on cue: when a prompt that begins with "!" is to have its third token.

`fault` says how. Only the first such request finds it (but "raise", which is the request's own fault each time), so
that a server that goes on can be seen to be well.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

from aserve.executors import StepError
from aserve.plan import StepPlan, StepResult
from tests.serving import TOKENIZER, EchoRunner

Fault = Literal["raise", "die", "hang", "exit", "short", "long", "nan", "memory"]
FAULTS: tuple[Fault, ...] = ("raise", "die", "hang", "exit", "short", "long", "nan", "memory")
DEADLY = frozenset({"die", "hang", "exit", "short", "long"})  # the engine cannot go on
[CUE] = TOKENIZER.encode("!", False)
_NUM_BEFORE = 2  # tokens that the request gets


class FaultyRunner(EchoRunner):
    """See above. `release` lets a step that hangs end."""

    def __init__(self, *, fault: Fault | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.fault = fault
        self.release = threading.Event()
        self._cued: set[int] = set()  # slots of requests that carry the cue

    def launch(self, plan: StepPlan) -> StepResult:
        for update in plan.slots:
            self._cued.discard(update.slot)
        self._cued |= {chunk.slot for chunk in plan.chunks if not chunk.start and chunk.tokens[0] == CUE}
        if self.fault is None or not any(self._is_due(slot, plan) for slot in plan.draws):
            return super().launch(plan)
        return self._fail(plan)

    def _is_due(self, slot: int, plan: StepPlan) -> bool:
        if slot not in self._cued:
            return False
        for update in plan.slots:  # computed again after a failed step: its tokens come in a chunk
            if update.slot == slot:
                end = max(chunk.start + len(chunk.tokens) for chunk in plan.chunks if slot in chunk.draws)
                return end >= update.num_prompt_tokens + _NUM_BEFORE
        state = self.slots[slot]
        return state.position + 1 >= state.update.num_prompt_tokens + _NUM_BEFORE

    def _fail(self, plan: StepPlan) -> StepResult:
        fault = self.fault
        if fault != "raise":
            self.fault = None
        match fault:
            case "raise" | "memory":
                self.plans.append(plan)
                self._lose(plan)
                raise StepError("a row cannot be computed", memory=fault == "memory")
            case "die":
                raise RuntimeError("the device fell off the bus")
            case "exit":
                raise SystemExit("killed")
            case "hang":
                self.release.wait()
        if fault == "nan":
            self.bad_slots |= {slot for slot in self._cued if slot in plan.draws}
        result = super().launch(plan)
        self.bad_slots.clear()
        if fault == "short":
            result.tokens.pop()
        if fault == "long":
            result.tokens.append(0)
        return result
