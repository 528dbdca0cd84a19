"""LoRA adapters on the device: slots, pins, and an LRU of idle adapters.

A slot holds the stacked A/B matrices of one adapter.  Requests pin the
adapter that they use; an adapter without pins stays resident and may be
evicted.  Loading takes a host staging area, and a reader/writer gate keeps
slot contents stable while a step runs.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Iterator, Optional, Type

import torch

logger = logging.getLogger(__name__)


class AdapterLoadError(RuntimeError):
    pass


class Gate:
    """Reader/writer gate; readers are decode steps, the writer is a loader."""

    def __init__(self) -> None:
        self._cv = threading.Condition()
        self._readers = 0
        self._writing = False

    def enter_read(self) -> None:
        with self._cv:
            while self._writing:
                self._cv.wait()
            self._readers += 1

    def leave_read(self) -> None:
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def enter_write(self, timeout: float) -> bool:
        with self._cv:
            ok = self._cv.wait_for(lambda: not self._writing and not self._readers, timeout)
            if ok:
                self._writing = True
            return ok

    def leave_write(self) -> None:
        with self._cv:
            self._writing = False
            self._cv.notify_all()


class HostArea:
    def __init__(self, count: int, numel: int) -> None:
        self._areas = [torch.empty(numel) for _ in range(count)]

    def rent(self) -> torch.Tensor:
        if not self._areas:
            raise AdapterLoadError("all staging areas are in use")
        return self._areas.pop()  # clean: returned

    def end_rent(self, area: torch.Tensor) -> None:
        self._areas.append(area)


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._unused = set(range(count))

    def assign(self) -> Optional[int]:
        return self._unused.pop() if self._unused else None  # clean: returned

    def unassign(self, slot: int) -> None:
        self._unused.add(slot)


class Adapter:
    def __init__(self, name: str, slot: int) -> None:
        self.name = name
        self.slot = slot
        self.pins = 0


class StepGuard:
    """Read side of the gate for the length of one model step."""

    def __init__(self, gate: Gate, profile: bool = False) -> None:
        self._gate = gate
        self._profile = profile
        self._started: Optional[torch.cuda.Event] = None

    def __enter__(self) -> "StepGuard":
        self._gate.enter_read()  # leak: on an error in the body with profiling on, __exit__ returns before leave_read
        if self._profile:
            self._started = torch.cuda.Event(enable_timing=True)
        return self

    def __exit__(
        self, tp: Optional[Type[BaseException]], val: Optional[BaseException], tb: Optional[TracebackType]
    ) -> bool:
        if self._started is not None:
            if tp is not None:
                logger.debug("step failed, no timing: %s", val)
                return False
            self._started.record()
        self._gate.leave_read()
        return False


class WriteGuard:
    def __init__(self, gate: Gate, timeout: float) -> None:
        self._gate = gate
        self._timeout = timeout
        self._held = False

    def __enter__(self) -> bool:
        self._held = self._gate.enter_write(self._timeout)  # clean: left in __exit__ exactly when it was entered
        return self._held

    def __exit__(self, *exc: object) -> None:
        if not self._held:
            return
        self._held = False
        self._gate.leave_write()


class AdapterRegistry:
    def __init__(self, root: Path, slots: int, numel: int, profile: bool = False) -> None:
        self.root = root
        self.numel = numel
        self.profile = profile
        self.slots = AdapterSlots(slots)
        self.host = HostArea(2, numel)
        self.gate = Gate()
        self.weights = torch.zeros(slots, numel)
        self._resident: OrderedDict[str, Adapter] = OrderedDict()

    # -- loading ---------------------------------------------------------

    def _read(self, name: str, into: torch.Tensor) -> None:
        path = self.root / f"{name}.pt"
        if not path.exists():
            raise AdapterLoadError(f"no such adapter: {name}")
        flat = torch.load(path, weights_only=True).flatten()
        if flat.numel() > into.numel():
            raise AdapterLoadError(f"{name}: rank too large")
        into[: flat.numel()].copy_(flat)

    def _slot_or_evict(self) -> Optional[int]:
        slot = self.slots.assign()  # clean: returned when there is one
        if slot is not None:
            return slot
        for name, adapter in self._resident.items():
            if adapter.pins == 0:
                del self._resident[name]
                return adapter.slot
        return None

    def load(self, name: str) -> Adapter:
        adapter = self._resident.get(name)
        if adapter is not None:
            self._resident.move_to_end(name)
            return adapter
        area = self.host.rent()  # clean: the finally ends the rent
        try:
            self._read(name, area)
            slot = self._slot_or_evict()  # leak: when the write gate times out, the raise below leaves with the slot unassigned to anything
            if slot is None:
                raise AdapterLoadError("all resident adapters are pinned")
            with WriteGuard(self.gate, 1.0) as ok:  # clean: left by the guard, and not entered when ok is false
                if not ok:
                    raise AdapterLoadError("device is busy")
                self.weights[slot].copy_(area)
        finally:
            self.host.end_rent(area)
        adapter = self._resident[name] = Adapter(name, slot)
        return adapter

    def preload(self, names: list[str]) -> int:
        """Fill unused slots at start-up, before any step can run."""
        loaded = 0
        for name in names:
            if name in self._resident:
                continue
            area = self.host.rent()  # leak: an adapter that fails to load is skipped by the handler with its area still rented
            slot = self.slots.assign()  # clean: unassigned in the handler, else owned by the resident adapter
            if slot is None:
                self.host.end_rent(area)
                break
            try:
                self._read(name, area)
            except AdapterLoadError as exc:
                logger.error("preload: %s", exc)
                self.slots.unassign(slot)
                continue
            self.weights[slot].copy_(area)
            self.host.end_rent(area)
            self._resident[name] = Adapter(name, slot)
            loaded += 1
        return loaded

    def replace(self, name: str) -> None:
        """Re-read an adapter whose file changed; keep the old on failure."""
        area = self.host.rent()  # clean: whatever _read and enter_write do, the finally ends the rent
        try:
            self._read(name, area)
            if not self.gate.enter_write(5.0):  # leak: an adapter that is not resident raises before leave_write
                return
            adapter = self._resident.get(name)
            if adapter is None:
                raise AdapterLoadError(f"{name} is not resident")
            self.weights[adapter.slot].copy_(area)
            self.gate.leave_write()
        finally:
            self.host.end_rent(area)

    # -- pinning ---------------------------------------------------------

    def pin(self, name: str) -> Adapter:
        adapter = self.load(name)
        adapter.pins += 1  # clean: the pinned adapter is returned for unpin
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        adapter.pins -= 1

    @contextmanager
    def pinned(self, names: list[str]) -> Iterator[list[int]]:
        with ExitStack() as stack:
            out = []
            for name in names:
                adapter = self.pin(name)  # clean: its unpin is on the stack before the next pin may raise
                stack.callback(self.unpin, adapter)
                out.append(adapter.slot)
            yield out

    def pin_all(self, names: list[str]) -> list[Adapter]:
        return [self.pin(name) for name in names]  # leak: a failing load in the middle loses the pins of the ones before it

    def step(self, names: list[str], x: torch.Tensor) -> torch.Tensor:
        with self.pinned(names) as slots, StepGuard(self.gate):  # clean: without profiling the guard always leaves the gate, and the pins go with the stack
            return x + self.weights[slots].sum(0)

    def timed_step(self, names: list[str], x: torch.Tensor) -> torch.Tensor:
        with self.pinned(names) as slots:  # clean: the stack unpins them on a ValueError too
            with StepGuard(self.gate, self.profile):  # leak: the ValueError takes the early return of __exit__ when profiling is on
                if x.shape[-1] != self.numel:
                    raise ValueError(f"expected {self.numel} features, got {x.shape[-1]}")
                return x + self.weights[slots].sum(0)
