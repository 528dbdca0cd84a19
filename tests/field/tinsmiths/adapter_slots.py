"""LoRA adapter slots on the device: load, pin, evict, batch mapping."""
from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Set

import torch

log = logging.getLogger("adapters")


class AdapterError(Exception):
    pass


@dataclass
class SlotRef:
    index: int
    rank: int
    name: str = ""
    resident: bool = False


class SlotBank:
    """Stacked A and B weights. A slot is a row of the stack."""

    def __init__(self, slots: int, max_rank: int, hidden: int, device: str = "cpu") -> None:
        self.a = torch.zeros(slots, max_rank, hidden, device=device)
        self.b = torch.zeros(slots, hidden, max_rank, device=device)
        self.max_rank = max_rank
        self._open: Set[int] = set(range(slots))
        self._guard = threading.Lock()

    def occupy(self, rank: int) -> Optional[SlotRef]:
        with self._guard:
            index = self._open.pop() if self._open else None  # leak: not put back when the rank is over the limit
        if index is None:
            return None
        if rank > self.max_rank:
            raise AdapterError(f"rank {rank} > {self.max_rank}")
        return SlotRef(index, rank)

    def release(self, ref: SlotRef) -> None:
        self.a[ref.index].zero_()
        self.b[ref.index].zero_()
        with self._guard:
            self._open.add(ref.index)

    def spare(self) -> int:
        return len(self._open)


class PinBoard:
    """Reference counts by adapter name."""

    def __init__(self) -> None:
        self._count: Counter = Counter()

    def hold(self, name: str) -> int:
        self._count[name] += 1
        return self._count[name]

    def let_go(self, name: str) -> None:
        self._count[name] -= 1
        if self._count[name] <= 0:
            del self._count[name]

    def busy(self, name: str) -> bool:
        return self._count[name] > 0


@dataclass
class Job:
    rid: str
    adapter: Optional[str]
    slot: int = -1
    held: bool = False
    errors: List[str] = field(default_factory=list)


class AdapterManager:
    def __init__(self, bank: SlotBank, root: Path, max_cold: int = 8) -> None:
        self.bank = bank
        self.root = root
        self.max_cold = max_cold
        self.pins = PinBoard()
        self.resident: "OrderedDict[str, SlotRef]" = OrderedDict()
        self.staging: Dict[str, SlotRef] = {}
        self.jobs: Dict[str, Job] = {}

    def _read(self, name: str) -> Optional[Dict[str, torch.Tensor]]:
        path = self.root / name / "adapter.pt"
        if not path.exists():
            return None
        return torch.load(path, map_location="cpu")

    def _evict_one(self) -> bool:
        for name in self.resident:
            if not self.pins.busy(name):
                self.bank.release(self.resident.pop(name))
                return True
        return False

    def _occupy_or_evict(self, rank: int) -> SlotRef:
        ref = self.bank.occupy(rank)  # clean: near miss, asked again only when this gave None
        if ref is None and self._evict_one():
            ref = self.bank.occupy(rank)  # clean: returned
        if ref is None:
            raise AdapterError("no adapter slot")
        return ref

    def load(self, name: str, rank: int) -> SlotRef:
        if name in self.resident:
            self.resident.move_to_end(name)
            return self.resident[name]
        ref = self._occupy_or_evict(rank)  # leak: not released when the checkpoint isn't found
        weights = self._read(name)
        if weights is None:
            raise AdapterError(f"unknown adapter {name}")
        self._fill(ref, weights)
        ref.name = name
        self.resident[name] = ref
        return ref

    def load_checked(self, name: str, rank: int) -> bool:
        if name in self.resident:
            return True
        ref = self._occupy_or_evict(rank)  # clean: released in except, else resident
        try:
            weights = self._read(name)
            if weights is None:
                raise AdapterError(name)
            self._fill(ref, weights)
        except Exception:
            self.bank.release(ref)
            raise
        ref.name = name
        self.resident[name] = ref
        return True

    def _fill(self, ref: SlotRef, weights: Dict[str, torch.Tensor]) -> None:
        self.bank.a[ref.index, :ref.rank].copy_(weights["a"])
        self.bank.b[ref.index, :, :ref.rank].copy_(weights["b"])
        ref.resident = True

    def stage(self, name: str, rank: int) -> None:
        if name in self.staging or name in self.resident:
            return
        self.staging[name] = self._occupy_or_evict(rank)  # leak: commit() drops the staged slot on a bad checksum

    def commit(self, name: str, weights: Dict[str, torch.Tensor], checksum_ok: bool) -> bool:
        ref = self.staging.pop(name, None)
        if ref is None:
            return False
        if not checksum_ok:
            log.error("checksum of %s", name)
            return False
        self._fill(ref, weights)
        ref.name = name
        old = self.resident.pop(name, None)
        if old is not None:
            self.bank.release(old)
        self.resident[name] = ref
        return True

    def replace(self, name: str, rank: int, weights: Dict[str, torch.Tensor]) -> None:
        fresh = self._occupy_or_evict(rank)  # clean: near miss, resident afterwards and the old one is released
        self._fill(fresh, weights)
        fresh.name = name
        old = self.resident.pop(name, None)
        self.resident[name] = fresh
        if old is not None:
            self.bank.release(old)

    def attach(self, job: Job) -> bool:
        self.jobs[job.rid] = job
        if job.adapter is None:
            return True
        self.pins.hold(job.adapter)  # clean: near miss, job.held makes detach() let go
        job.held = True
        ref = self.resident.get(job.adapter)
        if ref is None:
            return False
        job.slot = ref.index
        return True

    def detach(self, rid: str) -> None:
        job = self.jobs.pop(rid, None)
        if job is None:
            return
        if job.held:
            self.pins.let_go(job.adapter)
            job.held = False

    def map_batch(self, names: Iterable[str]) -> Optional[List[int]]:
        held: List[str] = []
        out: List[int] = []
        for name in names:
            self.pins.hold(name)  # leak: on a cold adapter the names held so far stay pinned
            held.append(name)
            ref = self.resident.get(name)
            if ref is None:
                return None
            out.append(ref.index)
        for name in held:
            self.pins.let_go(name)
        return out

    def run_batch(self, names: Iterable[str], kernel) -> bool:
        held: List[str] = []
        try:
            for name in names:
                self.pins.hold(name)  # clean: all of held are let go in finally
                held.append(name)
                if name not in self.resident:
                    return False
            kernel([self.resident[n].index for n in held])
            return True
        finally:
            for name in held:
                self.pins.let_go(name)

    def merge_delta(self, name: str, base: torch.Tensor) -> torch.Tensor:
        self.pins.hold(name)  # leak: not let go for an adapter that is not resident
        ref = self.resident.get(name)
        if ref is None:
            return base
        delta = self.bank.b[ref.index] @ self.bank.a[ref.index]
        out = base + delta
        self.pins.let_go(name)
        return out

    def warm(self, names: List[str], rank: int) -> int:
        n = 0
        for name in names:
            if name in self.resident:
                continue
            ref = self.bank.occupy(rank)  # clean: released when there are no weights, else resident
            if ref is None:
                break
            weights = self._read(name)
            if weights is None:
                self.bank.release(ref)
                continue
            self._fill(ref, weights)
            ref.name = name
            self.resident[name] = ref
            n += 1
        return n

    def close(self) -> None:
        for ref in list(self.resident.values()) + list(self.staging.values()):
            self.bank.release(ref)
        self.resident.clear()
        self.staging.clear()
