"""Adapter (LoRA) residency for multi-tenant fine-tuning: a handful of device slots, pinned while in use."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, Dict, List, Optional


class Mode(Enum):
    TRAIN = "train"
    EVAL = "eval"
    MERGE = "merge"


@dataclass
class AdapterSlot:
    index: int
    adapter: Optional[str] = None
    pins: int = 0
    version: int = 0


class AdapterRegistry:
    def __init__(self, slots: int):
        self._slots = [AdapterSlot(i) for i in range(slots)]
        self._where: Dict[str, AdapterSlot] = {}
        self._mu = threading.Lock()

    def pin(self, adapter: str) -> Optional[AdapterSlot]:
        """Makes the adapter resident and keeps it there until ``unpin``."""
        with self._mu:
            slot = self._where.get(adapter)
            if slot is None:
                slot = self._victim()
                if slot is None:
                    return None
                if slot.adapter is not None:
                    del self._where[slot.adapter]
                slot.adapter = adapter
                slot.version += 1
                self._where[adapter] = slot
            slot.pins += 1
            return slot

    def unpin(self, slot: AdapterSlot) -> None:
        with self._mu:
            slot.pins -= 1

    def _victim(self) -> Optional[AdapterSlot]:
        for s in self._slots:
            if s.pins == 0:
                return s
        return None

    def pinned(self) -> int:
        return sum(s.pins for s in self._slots)


@dataclass
class TrainRequest:
    adapter: str
    batch: List[float]
    mode: Mode = Mode.TRAIN
    slot: Optional[AdapterSlot] = None
    on_done: List[Callable[["TrainRequest"], None]] = field(default_factory=list)

    def finish(self) -> None:
        for fn in self.on_done:
            fn(self)
        self.on_done.clear()


class AdapterScheduler:
    def __init__(self, registry: AdapterRegistry):
        self.registry = registry
        self.waiting: List[TrainRequest] = []
        self.running: Dict[int, TrainRequest] = {}
        self._ids = 0

    def admit(self, req: TrainRequest) -> bool:
        slot = self.registry.pin(req.adapter)  # clean: near miss, moves into the request, retire unpins it
        if slot is None:
            self.waiting.append(req)
            return False
        req.slot = slot
        self._ids += 1
        self.running[self._ids] = req
        return True

    def retire(self, ident: int) -> None:
        req = self.running.pop(ident)
        if req.slot is not None:
            self.registry.unpin(req.slot)
            req.slot = None
        req.finish()

    def pump(self) -> int:
        """Admits what it can; merge requests have to run alone."""
        started = 0
        for req in list(self.waiting):
            slot = self.registry.pin(req.adapter)  # leak: a merge request that has to wait keeps its pin
            if slot is None:
                break
            if req.mode is Mode.MERGE and self.running:
                continue
            self.waiting.remove(req)
            req.slot = slot
            self._ids += 1
            self.running[self._ids] = req
            started += 1
        return started

    def run_inline(self, req: TrainRequest) -> float:
        slot = self.registry.pin(req.adapter)  # clean: near miss, the callback unpins and finish is on every way
        if slot is None:
            return 0.0
        req.on_done.append(lambda _r: self.registry.unpin(slot))
        if not req.batch:
            req.finish()
            return 0.0
        loss = sum(req.batch) / len(req.batch)
        req.finish()
        return loss

    def run_detached(self, req: TrainRequest) -> Optional[float]:
        slot = self.registry.pin(req.adapter)  # leak: an evaluation returns before the callback is registered
        if slot is None:
            return None
        if req.mode is Mode.EVAL:
            return sum(req.batch)
        req.on_done.append(lambda _r: self.registry.unpin(slot))
        req.finish()
        return float(slot.version)


class AdapterSession:
    """Pins lazily; train and eval share one pin."""

    def __init__(self, registry: AdapterRegistry, adapter: str):
        self.registry = registry
        self.adapter = adapter
        self._slot: Optional[AdapterSlot] = None

    def _ensure(self) -> Optional[AdapterSlot]:
        if self._slot is None:
            self._slot = self.registry.pin(self.adapter)  # clean: near miss, None guard here and in close
        return self._slot

    def train(self, x: float) -> float:
        slot = self._ensure()
        return x if slot is None else x * slot.version

    def close(self) -> None:
        if self._slot is not None:
            self.registry.unpin(self._slot)
            self._slot = None


def distil(registry: AdapterRegistry, teacher: str, student: str, same_ok: bool) -> Optional[int]:
    src = registry.pin(teacher)  # clean: unpinned on each way
    if src is None:
        return None
    dst = src if teacher == student and same_ok else registry.pin(student)  # clean: near miss, unpinned when it is not the teacher's
    if dst is None:
        registry.unpin(src)
        return None
    dst.version = max(dst.version, src.version)
    out = dst.version
    if not (teacher == student and same_ok):
        registry.unpin(dst)
    registry.unpin(src)
    return out


def merge_into_base(registry: AdapterRegistry, name: str, commit: bool, dry_run: bool) -> int:
    slot = None
    if commit or dry_run:
        slot = registry.pin(name)  # leak: a dry run is pinned but only a commit is unpinned
    version = slot.version if slot is not None else 0
    if commit and slot is not None:
        slot.version += 1
        registry.unpin(slot)
    return version
