"""ZeRO-3 style gathering of partitioned parameters into a bounded arena."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import torch
import torch.distributed as dist


class ArenaFull(RuntimeError):
    pass


class Segment(NamedTuple):
    start: int
    numel: int


class GatherArena:
    def __init__(self, numel: int, dtype: torch.dtype, device: str) -> None:
        self.storage = torch.empty(numel, dtype=dtype, device=device)
        self._holes: List[Segment] = [Segment(0, numel)]

    def alloc(self, numel: int) -> Segment:
        for i, hole in enumerate(self._holes):
            if hole.numel >= numel:
                rest = Segment(hole.start + numel, hole.numel - numel)
                self._holes[i:i + 1] = [rest] if rest.numel else []
                return Segment(hole.start, numel)
        raise ArenaFull(f"no hole of {numel} elements")

    def free(self, seg: Segment) -> None:
        self._holes.append(seg)
        self._holes.sort()
        merged: List[Segment] = []
        for hole in self._holes:
            if merged and merged[-1].start + merged[-1].numel == hole.start:
                last = merged.pop()
                hole = Segment(last.start, last.numel + hole.numel)
            merged.append(hole)
        self._holes = merged

    def view(self, seg: Segment) -> torch.Tensor:
        return self.storage[seg.start:seg.start + seg.numel]


class ParamCoordinator:
    def __init__(self, arena: GatherArena, group: Any) -> None:
        self.arena = arena
        self.group = group
        self.records: Dict[str, Dict[str, Any]] = {}
        self._prefetched: List[Dict[str, Any]] = []
        self._eval_pins: Dict[str, Dict[str, Any]] = {}

    def register(self, name: str, shard: torch.Tensor, numel: int, frozen: bool) -> None:
        self.records[name] = {"name": name, "shard": shard, "numel": numel, "frozen": frozen,
                              "seg": None, "users": 0}

    def fetch(self, rec: Dict[str, Any]) -> torch.Tensor:
        if rec["users"] == 0:
            rec["seg"] = self.arena.alloc(rec["numel"])  # clean: release frees the segment with the last user
            dist.all_gather_into_tensor(self.arena.view(rec["seg"]), rec["shard"], group=self.group)
        rec["users"] += 1
        return self.arena.view(rec["seg"])

    def release(self, rec: Dict[str, Any]) -> None:
        rec["users"] -= 1
        if rec["users"] == 0:
            self.arena.free(rec["seg"])
            rec["seg"] = None

    @contextlib.contextmanager
    def gathered(self, names: List[str]) -> Iterator[Dict[str, torch.Tensor]]:
        held: List[Dict[str, Any]] = []
        views: Dict[str, torch.Tensor] = {}
        try:
            for name in names:
                rec = self.records[name]
                views[name] = self.fetch(rec)  # clean: near miss, a later ArenaFull still releases those in held
                held.append(rec)
            yield views
        finally:
            for rec in held:
                self.release(rec)

    def prefetch(self, window: List[str]) -> int:
        count = 0
        for name in window:
            rec = self.records[name]
            try:
                self.fetch(rec)  # clean: near miss, recorded in _prefetched, released in end_step
            except ArenaFull:
                break
            self._prefetched.append(rec)
            count += 1
        return count

    def end_step(self) -> None:
        while self._prefetched:
            self.release(self._prefetched.pop())

    def run_module(self, module: Any, names: List[str], x: torch.Tensor) -> torch.Tensor:
        recs = [self.records[n] for n in names]
        views = [self.fetch(rec) for rec in recs]  # leak: frozen parameters are never released after the call
        out = module(x, *views)
        for rec in recs:
            if rec["frozen"]:
                continue
            self.release(rec)
        return out

    def export_state(self, prefix: str, dtypes: List[torch.dtype]) -> Dict[str, torch.Tensor]:
        state: Dict[str, torch.Tensor] = {}
        for name, rec in self.records.items():
            if not name.startswith(prefix):
                continue
            full = self.fetch(rec)  # leak: an unsupported dtype goes on to the next name without release
            if full.dtype not in dtypes:
                continue
            state[name] = full.cpu().clone()
            self.release(rec)
        return state

    def checksum(self, prefix: str) -> Dict[str, float]:
        sums: Dict[str, float] = {}
        for name, rec in self.records.items():
            if not name.startswith(prefix):
                continue
            full = self.fetch(rec)  # clean: near miss, released ahead of the continue
            total = float(full.double().sum())
            self.release(rec)
            if total == 0.0:
                continue
            sums[name] = total
        return sums

    def tie(self, src: str, dst: str) -> bool:
        a, b = self.records[src], self.records[dst]
        source = self.fetch(a)  # leak: stays gathered when the target does not fit
        try:
            target = self.fetch(b)  # clean: released at the end
        except ArenaFull:
            return False
        target.copy_(source)
        self.release(b)
        self.release(a)
        return True

    def same_values(self, left: str, right: str) -> Optional[bool]:
        a, b = self.records[left], self.records[right]
        x = self.fetch(a)  # clean: near miss, the outer finally releases when the second fetch fails
        try:
            try:
                y = self.fetch(b)  # clean: released after the comparison
            except ArenaFull:
                return None
            equal = torch.equal(x, y)
            self.release(b)
            return equal
        finally:
            self.release(a)

    def begin_eval(self, names: List[str]) -> None:
        for name in names:
            if name in self._eval_pins:
                continue
            rec = self.records[name]
            self.fetch(rec)  # clean: near miss, pinned under its name until end_eval
            self._eval_pins[name] = rec

    def end_eval(self) -> None:
        for rec in self._eval_pins.values():
            self.release(rec)
        self._eval_pins.clear()

    def grow(self, name: str, numel: int) -> bool:
        rec = self.records[name]
        if rec["users"] == 0:
            rec["numel"] = numel
            return True
        try:
            wider = self.arena.alloc(numel)  # leak: replaces the record's segment, and the old one is not freed
        except ArenaFull:
            return False
        self.arena.view(wider)[:rec["numel"]].copy_(self.arena.view(rec["seg"]))
        rec["seg"] = wider
        rec["numel"] = numel
        return True
