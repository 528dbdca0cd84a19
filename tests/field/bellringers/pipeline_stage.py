"""1F1B pipeline stage: activation slots, weight versions and the step lock."""
from __future__ import annotations

import heapq
import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Set

import torch
from torch import nn

logger = logging.getLogger("pipe.stage")


class SlotHeap:
    """Lowest-numbered free activation slot first. claim() is None when full."""

    def __init__(self, count: int) -> None:
        self._heap: List[int] = list(range(count))
        heapq.heapify(self._heap)
        self.count = count

    def claim(self) -> Optional[int]:
        if not self._heap:
            return None
        return heapq.heappop(self._heap)

    def vacate(self, slot: int) -> None:
        heapq.heappush(self._heap, slot)

    @property
    def idle(self) -> int:
        return len(self._heap)


class WeightVersions:
    """Reference-counted parameter snapshots; a snapshot goes away at count zero."""

    def __init__(self) -> None:
        self._snap: Dict[int, Dict[str, torch.Tensor]] = {}
        self._refs: Dict[int, int] = {}

    def publish(self, version: int, module: nn.Module) -> None:
        self._snap[version] = {k: v.detach().clone() for k, v in module.named_parameters()}
        self._refs.setdefault(version, 0)

    def retain(self, version: int) -> Dict[str, torch.Tensor]:
        self._refs[version] += 1
        return self._snap[version]

    def drop(self, version: int) -> None:
        self._refs[version] -= 1
        if self._refs[version] == 0:
            del self._refs[version]
            del self._snap[version]


@dataclass
class Pending:
    mb: int
    slot: int
    version: int
    inputs: Any = None
    sent: bool = False


@dataclass
class StageStats:
    refused: int = 0
    replayed: int = 0
    skipped: Set[int] = field(default_factory=set)


class PipelineStage:
    def __init__(self, module: nn.Module, slots: SlotHeap, versions: WeightVersions, is_last: bool) -> None:
        self.module = module
        self.slots = slots
        self.versions = versions
        self.is_last = is_last
        self.live: Dict[int, Pending] = {}
        self.replays: Dict[int, int] = {}
        self.anchors: Dict[int, Dict[str, torch.Tensor]] = {}
        self.acts: List[Optional[torch.Tensor]] = [None] * slots.count
        self.version = 0
        self.stats = StageStats()
        self._mu = threading.Lock()

    def forward(self, mb: int, x: torch.Tensor) -> Optional[torch.Tensor]:
        if mb in self.live:
            return None
        slot = self.slots.claim()  # clean: near miss, moved into live, which backward() pops and vacates
        if slot is None:
            self.stats.refused += 1
            return None
        self.versions.retain(self.version)  # clean: the version is kept in Pending and dropped by backward()
        self.live[mb] = Pending(mb, slot, self.version, inputs=x)
        y = self.module(x)
        self.acts[slot] = y
        return y

    def backward(self, mb: int, grad: torch.Tensor) -> torch.Tensor:
        p = self.live.pop(mb)
        y = self.acts[p.slot]
        y.backward(grad)
        self.acts[p.slot] = None
        self.slots.vacate(p.slot)
        self.versions.drop(p.version)
        return p.inputs.grad

    def forward_eval(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        slot = self.slots.claim()  # leak: not vacated on the last stage
        if slot is None:
            raise RuntimeError("no slot for eval")
        with torch.no_grad():
            y = self.module(x)
        self.acts[slot] = y
        if self.is_last:
            return nn.functional.cross_entropy(y, target)
        self.acts[slot] = None
        self.slots.vacate(slot)
        return y

    def probe(self, x: torch.Tensor) -> bool:
        slot = self.slots.claim()  # leak: slot 0 is taken for a failure and never vacated
        if not slot:
            return False
        with torch.no_grad():
            self.acts[slot] = self.module(x)
        self.acts[slot] = None
        self.slots.vacate(slot)
        return True

    def recompute(self, mb: int) -> torch.Tensor:
        slot = self.slots.claim()  # clean: vacated in finally
        if slot is None:
            return self.module(self.live[mb].inputs)
        try:
            with torch.enable_grad():
                self.acts[slot] = self.module(self.live[mb].inputs)
            return self.acts[slot]
        finally:
            self.acts[slot] = None
            self.slots.vacate(slot)

    def replay(self, mb: int) -> bool:
        slot = self.slots.claim()  # leak: replaying a microbatch twice overwrites its slot in replays
        if slot is None:
            return False
        self.replays[mb] = slot
        self.stats.replayed += 1
        return True

    def finish_replay(self, mb: int) -> None:
        slot = self.replays.pop(mb, None)
        if slot is not None:
            self.slots.vacate(slot)

    def anchor(self, version: int) -> None:
        if version in self.anchors:
            return
        self.anchors[version] = self.versions.retain(version)  # leak: trim_anchors() deletes the entry without a drop

    def trim_anchors(self, keep: int) -> None:
        for version in sorted(self.anchors)[:-keep]:
            del self.anchors[version]

    def diff_versions(self, a: int, b: int) -> float:
        left = self.versions.retain(a)  # clean: dropped at the end
        right = self.versions.retain(b)  # clean: dropped at the end
        worst = max(float((left[k] - right[k]).abs().max()) for k in left)
        self.versions.drop(b)
        self.versions.drop(a)
        return worst

    def restore(self, version: int) -> int:
        snap = self.versions.retain(version)  # leak: not dropped when a parameter is missing from the snapshot
        restored = 0
        with torch.no_grad():
            for name, p in self.module.named_parameters():
                if name not in snap:
                    logger.warning("version %d lacks %s", version, name)
                    return -1
                p.copy_(snap[name])
                restored += 1
        self.versions.drop(version)
        return restored

    def try_step(self, opt: torch.optim.Optimizer) -> bool:
        if not self._mu.acquire(blocking=False):  # clean: released on both ways out
            return False
        if self.live:
            self._mu.release()
            return False
        opt.step()
        self.version += 1
        self.versions.publish(self.version, self.module)
        self._mu.release()
        return True

    def set_lr(self, opt: torch.optim.Optimizer, lr: float) -> None:
        self._mu.acquire()  # leak: not released when the rate is unchanged
        if all(g["lr"] == lr for g in opt.param_groups):
            return
        for g in opt.param_groups:
            g["lr"] = lr
        self._mu.release()

    def reserve(self, n: int) -> Optional[List[int]]:
        got: List[int] = []
        for _ in range(n):
            slot = self.slots.claim()  # clean: near miss, the ones already got are vacated when one is refused
            if slot is None:
                for s in got:
                    self.slots.vacate(s)
                return None
            got.append(slot)
        return got

    def warmup(self, n: int, sample: torch.Tensor) -> int:
        slots = self.reserve(n)  # clean: each one is vacated in the loop
        if slots is None:
            return 0
        for s in slots:
            with torch.no_grad():
                self.acts[s] = self.module(sample)
            self.acts[s] = None
            self.slots.vacate(s)
        return n
