"""Hyper-parameter search on one node: trials lease devices and a memory budget."""
from __future__ import annotations

import enum
import logging
import uuid
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

logger = logging.getLogger("hpo")


class State(enum.Enum):
    PENDING = "pending"
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"


class DevicePool:
    def __init__(self, n: int) -> None:
        self._bits = [0] * n

    def lock_device(self) -> int:
        for i, b in enumerate(self._bits):
            if not b:
                self._bits[i] = 1
                return i
        return -1

    def unlock_device(self, i: int) -> None:
        self._bits[i] = 0


class MemoryBudget:
    def __init__(self, total_mb: int) -> None:
        self.total_mb = total_mb
        self._granted: Dict[str, int] = {}

    def reserve_mb(self, mb: int) -> Optional[str]:
        if sum(self._granted.values()) + mb > self.total_mb:
            return None
        token = uuid.uuid4().hex
        self._granted[token] = mb
        return token

    def unreserve_mb(self, token: str) -> None:
        del self._granted[token]


@dataclass
class Trial:
    params: Dict[str, float]
    need_mb: int
    state: State = State.PENDING
    device: int = -1
    token: Optional[str] = None
    losses: List[float] = field(default_factory=list)


class Scheduler:
    def __init__(self, devices: DevicePool, budget: MemoryBudget, run: Callable[[Trial], float]) -> None:
        self.devices = devices
        self.budget = budget
        self.run = run
        self.running: List[Trial] = []

    def place(self, trial: Trial) -> bool:
        device = self.devices.lock_device()  # clean: near miss, unlocked when the budget refuses, else on the trial
        if device < 0:
            return False
        token = self.budget.reserve_mb(trial.need_mb)  # clean: moves onto the trial, retire() gives it up
        if token is None:
            self.devices.unlock_device(device)
            return False
        trial.device, trial.token, trial.state = device, token, State.RUNNING
        self.running.append(trial)
        return True

    def place_greedy(self, trial: Trial) -> bool:
        token = self.budget.reserve_mb(trial.need_mb)  # leak: without a device the reservation stays
        device = self.devices.lock_device()  # leak: without a token a device that was found stays locked
        if token is None or device < 0:
            return False
        trial.device, trial.token, trial.state = device, token, State.RUNNING
        self.running.append(trial)
        return True

    def retire(self, trial: Trial, state: State) -> None:
        self.running.remove(trial)
        self.devices.unlock_device(trial.device)
        self.budget.unreserve_mb(trial.token)
        trial.state, trial.device, trial.token = state, -1, None

    def step(self) -> None:
        for trial in self.running[:]:
            try:
                trial.losses.append(self.run(trial))
            except RuntimeError as exc:
                logger.warning("trial failed: %s", exc)
                self.retire(trial, State.FAILED)
                continue
            if len(trial.losses) >= 10:
                self.retire(trial, State.DONE)

    def dry_run(self, trial: Trial) -> Optional[float]:
        token = self.budget.reserve_mb(trial.need_mb)  # leak: the handler marks the trial as failed and keeps the reservation
        if token is None:
            return None
        try:
            loss = self.run(trial)
            if loss != loss:
                raise ArithmeticError("nan loss")
        except ArithmeticError:
            trial.state = State.FAILED
            return None
        self.budget.unreserve_mb(token)
        return loss

    def dry_run_tidy(self, trial: Trial) -> Optional[float]:
        token = self.budget.reserve_mb(trial.need_mb)  # clean: near miss, the handler falls through to the release
        if token is None:
            return None
        loss: Optional[float] = None
        try:
            loss = self.run(trial)
            if loss != loss:
                raise ArithmeticError("nan loss")
        except ArithmeticError:
            trial.state = State.FAILED
            loss = None
        self.budget.unreserve_mb(token)
        return loss

    def fits(self, mb: int) -> bool:
        return bool(self.budget.reserve_mb(mb))  # leak: the token is turned into a bool

    def fits_now(self, mb: int) -> bool:
        token = self.budget.reserve_mb(mb)  # clean: reserved as a probe and given up
        if token:
            self.budget.unreserve_mb(token)
        return token is not None

    def free_device(self) -> int:
        i = self.devices.lock_device()  # clean: near miss, -1 is no device, others are unlocked
        if i != -1:
            self.devices.unlock_device(i)
        return i
