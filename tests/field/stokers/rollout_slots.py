from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

import torch

log = logging.getLogger(__name__)


class SlotTable:
    """Sequence slots of the generation engine."""

    def __init__(self, size: int) -> None:
        self._vacant: Deque[int] = deque(range(size))
        self.busy: set[int] = set()

    def seat(self) -> int:
        """Seat number, or -1 with all seats taken."""
        if not self._vacant:
            return -1
        slot = self._vacant.popleft()
        self.busy.add(slot)
        return slot

    def seat_many(self, n: int) -> List[int]:
        seats: List[int] = []
        for _ in range(n):
            slot = self.seat()  # clean: near miss, all seats taken so far are unseated where the group does not fit
            if slot < 0:
                for s in seats:
                    self.unseat(s)
                return []
            seats.append(slot)
        return seats

    def unseat(self, slot: int) -> None:
        self.busy.remove(slot)
        self._vacant.append(slot)


class WeightVersions:
    """Versions of the policy that rollouts still depend on are kept in memory."""

    def __init__(self) -> None:
        self.current = 0
        self._users: Dict[int, int] = {}
        self._state: Dict[int, Dict[str, torch.Tensor]] = {}

    def publish(self, state: Dict[str, torch.Tensor]) -> int:
        self.current += 1
        self._state[self.current] = state
        return self.current

    def subscribe(self) -> int:
        self._users[self.current] = self._users.get(self.current, 0) + 1
        return self.current

    def unsubscribe(self, version: int) -> None:
        self._users[version] -= 1
        if not self._users[version]:
            del self._users[version]
            if version != self.current:
                self._state.pop(version, None)


class Phase(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"


@dataclass
class Rollout:
    ident: str
    prompt: List[int]
    slot: int
    version: int
    phase: Phase = Phase.RUNNING
    tokens: List[int] = field(default_factory=list)


class RolloutEngine:
    def __init__(self, slots: SlotTable, versions: WeightVersions, step_fn: Callable[[List[int]], List[int]], max_len: int, eos: int) -> None:
        self.slots = slots
        self.versions = versions
        self.step_fn = step_fn
        self.max_len = max_len
        self.eos = eos
        self.active: Dict[str, Rollout] = {}
        self.paused: Dict[str, Rollout] = {}
        self.finished: List[Rollout] = []
        self.reference: Optional[int] = None
        self.sticky: Dict[str, int] = {}

    def submit(self, ident: str, prompt: List[int]) -> bool:
        version = self.versions.subscribe()  # leak: with no seat the subscription is not undone
        slot = self.slots.seat()  # clean: kept in the rollout, unseated when it retires or pauses
        if slot < 0:
            return False
        self.active[ident] = Rollout(ident, prompt, slot, version)
        return True

    def submit_group(self, ident: str, prompt: List[int], n: int) -> bool:
        seats = self.slots.seat_many(n)  # clean: near miss, an empty list holds nothing, else each seat goes to a rollout
        if not seats:
            return False
        for i, slot in enumerate(seats):
            version = self.versions.subscribe()  # clean: near miss, one subscription for each rollout, undone when it retires
            self.active[f"{ident}/{i}"] = Rollout(f"{ident}/{i}", prompt, slot, version)
        return True

    def submit_pairs(self, ident: str, prompts: Sequence[List[int]]) -> int:
        seats = self.slots.seat_many(2 * len(prompts))  # leak: prompts over the length limit continue and their two seats stay taken
        if not seats:
            return 0
        placed = 0
        for i, prompt in enumerate(prompts):
            if len(prompt) >= self.max_len:
                continue
            for j in (2 * i, 2 * i + 1):
                version = self.versions.subscribe()  # clean: undone when its rollout retires
                self.active[f"{ident}/{j}"] = Rollout(f"{ident}/{j}", prompt, seats[j], version)
            placed += 1
        return placed

    def _retire(self, roll: Rollout) -> None:
        roll.phase = Phase.DONE
        self.slots.unseat(roll.slot)
        self.versions.unsubscribe(roll.version)
        self.finished.append(roll)

    def step(self) -> int:
        order = list(self.active.values())
        if not order:
            return 0
        for roll, token in zip(order, self.step_fn([r.slot for r in order])):
            roll.tokens.append(token)
            if token == self.eos or len(roll.prompt) + len(roll.tokens) >= self.max_len:
                self._retire(self.active.pop(roll.ident))
        return len(order)

    def pause(self, ident: str) -> bool:
        roll = self.active.pop(ident, None)
        if roll is None:
            return False
        self.slots.unseat(roll.slot)
        roll.slot = -1
        roll.phase = Phase.PAUSED
        self.paused[ident] = roll
        return True

    def resume(self, ident: str, refresh: bool) -> bool:
        roll = self.paused.get(ident)
        if roll is None:
            return False
        slot = self.slots.seat()  # clean: near miss, a negative number holds nothing, else the rollout takes it
        if slot < 0:
            return False
        del self.paused[ident]
        if refresh:
            roll.version = self.versions.subscribe()  # leak: overwrites the subscription the rollout was paused with
            roll.tokens.clear()
        roll.slot = slot
        roll.phase = Phase.RUNNING
        self.active[ident] = roll
        return True

    def migrate(self, ident: str) -> bool:
        roll = self.active.get(ident)
        if roll is None or roll.version == self.versions.current:
            return False
        old = roll.version
        roll.version = self.versions.subscribe()  # clean: near miss, the overwritten version is unsubscribed from its copy
        self.versions.unsubscribe(old)
        return True

    def pin_reference(self) -> int:
        if self.reference is not None:
            self.versions.unsubscribe(self.reference)
        self.reference = self.versions.subscribe()  # clean: near miss, the former reference was undone, this one is undone by shutdown
        return self.reference

    def stick(self, session: str) -> int:
        slot = self.sticky.get(session, -1)
        if slot < 0:
            slot = self.slots.seat()  # leak: shutdown clears the sticky table without unseating
            if slot >= 0:
                self.sticky[session] = slot
        return slot

    def score(self, prompts: List[List[int]]) -> List[Tuple[int, int]]:
        result: List[Tuple[int, int]] = []
        for prompt in prompts:
            slot = self.slots.seat()  # clean: near miss, unseated before the continue as well
            if slot < 0:
                break
            token = self.step_fn([slot])[0]
            if token == self.eos:
                self.slots.unseat(slot)
                continue
            result.append((slot, token))
            self.slots.unseat(slot)
        return result

    def abort(self, ident: str) -> None:
        roll = self.active.pop(ident, None)
        if roll is not None:
            self._retire(roll)
            return
        roll = self.paused.pop(ident, None)
        if roll is not None:
            roll.phase = Phase.DONE
            self.versions.unsubscribe(roll.version)

    def shutdown(self) -> None:
        for ident in [*self.active, *self.paused]:
            self.abort(ident)
        if self.reference is not None:
            self.versions.unsubscribe(self.reference)
            self.reference = None
        self.sticky.clear()
