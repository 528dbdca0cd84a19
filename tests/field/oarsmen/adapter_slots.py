"""LoRA adapters share a few slots of a stacked weight buffer on the GPU.

A request that needs an adapter holds a use of its slot until it is finished. A slot with no uses may be reloaded
with another adapter. The engine thread is the only one that touches the table, so there are no locks.
"""
from __future__ import annotations

import collections
import heapq
import logging
import time
import typing as t

import torch

LOGGER = logging.getLogger("adapters")

BASE = ""

class NoSlot(Exception): ...
class BadAdapter(Exception): ...


class Slot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.adapter: t.Optional[str] = None
        self.uses = 0
        self.last = 0.0


class SlotTable:
    def __init__(self, n: int, rank: int, width: int, load: t.Callable[[str], "torch.Tensor"]) -> None:
        self.slots = [Slot(i) for i in range(n)]
        self.stack = torch.zeros((n, rank, width), device="cuda", dtype=torch.float16)
        self.load = load
        self.by_name: t.Dict[str, Slot] = {}
        self.loads = 0

    def _victim(self) -> t.Optional[Slot]:
        idle = [s for s in self.slots if s.uses == 0]
        return min(idle, key=lambda s: s.last) if idle else None

    def _take(self) -> Slot:
        slot = self._victim()
        if slot is None:
            raise NoSlot()
        if slot.adapter is not None:
            del self.by_name[slot.adapter]
            slot.adapter = None
        slot.uses = 1
        return slot

    def use(self, name: str) -> Slot:
        """One use of the slot that holds the adapter, loading it when it must be."""
        slot = self.by_name.get(name)
        if slot is not None:
            slot.uses += 1
            return slot
        slot = self._take()  # leak: BadAdapter is raised with the use of _take() still counted, the slot is never idle again
        weights = self.load(name)
        if weights.shape != self.stack[slot.index].shape:
            raise BadAdapter(f"{name}: {tuple(weights.shape)}")
        self.stack[slot.index].copy_(weights, non_blocking=True)
        slot.adapter = name
        self.by_name[name] = slot
        self.loads += 1
        return slot

    def try_use(self, name: str) -> t.Optional[Slot]:
        try:
            return self.use(name)  # clean: returned
        except NoSlot:
            return None

    def done(self, slot: Slot) -> None:
        slot.uses -= 1
        slot.last = time.monotonic()


class Request:
    def __init__(self, rid: int, adapter: str, prompt: t.List[int], draft: str = BASE) -> None:
        self.rid = rid
        self.adapter = adapter
        self.draft = draft
        self.prompt = prompt
        self.slot: t.Optional[Slot] = None
        self.draft_slot: t.Optional[Slot] = None
        self.generated: t.List[int] = []
        self.cancelled = False

    def detach(self, table: SlotTable) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            table.done(slot)

    def __lt__(self, other: "Request") -> bool:
        return self.rid < other.rid


class Engine:
    def __init__(self, table: SlotTable, step: t.Callable[[t.List[Request]], t.List[int]], width: int) -> None:
        self.table = table
        self.step = step
        self.width = width
        self.queue: t.List[Request] = []
        self.active: t.List[Request] = []
        self.parked: t.Deque[Request] = collections.deque()
        self.resident: t.Dict[str, Slot] = {}
        self.upcoming: t.Dict[int, Slot] = {}
        self.events: t.Counter = collections.Counter()

    def submit(self, req: Request) -> None:
        heapq.heappush(self.queue, req)

    def schedule(self) -> None:
        skipped = []
        while self.queue and len(self.active) < self.width:
            req = heapq.heappop(self.queue)
            if req.cancelled:
                continue
            if req.adapter != BASE:
                slot = self.table.try_use(req.adapter)  # clean: near miss, None or in the request, finish() and park() detach it
                if slot is None:
                    skipped.append(req)
                    continue
                req.slot = slot
            self.active.append(req)
        for req in skipped:
            heapq.heappush(self.queue, req)

    def schedule_drafted(self, req: Request) -> bool:
        """A request that speculates with a second, small adapter."""
        main = self.table.try_use(req.adapter)  # leak: without a slot for the draft the request is turned away, the main slot keeps its use
        if main is None:
            return False
        draft = self.table.try_use(req.draft)  # leak: goes to req.draft_slot, and detach() gives back req.slot only
        if draft is None:
            self.events["no_draft"] += 1
            return False
        req.slot = main
        req.draft_slot = draft
        self.active.append(req)
        return True

    def tick(self) -> None:
        self.schedule()
        if not self.active:
            return
        tokens = self.step(self.active)
        still = []
        for req, tok in zip(self.active, tokens):
            req.generated.append(tok)
            if req.cancelled or tok == 2:
                self.finish(req)
            else:
                still.append(req)
        self.active = still

    def finish(self, req: Request) -> None:
        req.detach(self.table)
        self.events["finished"] += 1

    def park(self, n: int) -> None:
        """Take the n youngest requests off the GPU."""
        for _ in range(min(n, len(self.active))):
            req = self.active.pop()
            req.detach(self.table)
            self.parked.append(req)

    def unpark(self) -> None:
        while self.parked:
            req = self.parked[0]
            if req.adapter == BASE:
                self.active.append(self.parked.popleft())
                continue
            try:
                req.slot = self.table.use(req.adapter)  # clean: near miss, on either exception there is nothing to detach
            except NoSlot:
                break
            except BadAdapter:
                self.parked.popleft()
                self.finish(req)
                continue
            self.active.append(self.parked.popleft())

    def keep_resident(self, names: t.Iterable[str]) -> None:
        """Adapters of paying customers always stay loaded."""
        names = set(names)
        for name in list(self.resident):
            if name not in names:
                self.table.done(self.resident.pop(name))
        for name in names:
            if name not in self.resident:
                slot = self.table.try_use(name)  # clean: the table of residents gives it back when the name is not listed any more
                if slot is None:
                    LOGGER.warning("%s cannot be made resident", name)
                    continue
                self.resident[name] = slot

    def prepare_swap(self, req: Request, name: str) -> None:
        """The next turn of this conversation wants another adapter: load it while the present turn decodes."""
        if req.rid not in self.upcoming:
            self.upcoming[req.rid] = self.table.use(name)  # leak: finish() of a request that ends before commit_swap() does not look into this table

    def commit_swap(self, req: Request, name: str) -> bool:
        fresh = self.upcoming.pop(req.rid, None)
        if fresh is not None:
            req.detach(self.table)
            req.adapter, req.slot = name, fresh
        return fresh is not None

    def replace_adapter(self, req: Request, name: str) -> None:
        if req not in self.active:
            req.adapter = name
            return
        fresh = self.table.use(name)  # clean: near miss, the old slot is detached before the new one takes its place
        req.detach(self.table)
        req.adapter, req.slot = name, fresh

    def warm(self, names: t.List[str]) -> int:
        ready = 0
        for name in names:
            slot = self.table.try_use(name)  # clean: done at once so that the adapter stays loaded but idle
            if slot is None:
                break
            self.table.done(slot)
            ready += 1
        return ready

    def merge(self, names: t.List[str], weights: t.List[float]) -> "torch.Tensor":
        """Weighted sum of adapters, computed from the stacked buffer."""
        held: t.List[Slot] = []
        try:
            for name in names:
                held.append(self.table.use(name))  # clean: those in the list are done in the finally, the failing one is not in it
            idx = torch.tensor([s.index for s in held], device="cuda")
            w = torch.tensor(weights, device="cuda", dtype=torch.float16).view(-1, 1, 1)
            return (self.table.stack[idx] * w).sum(0)
        finally:
            for s in held:
                self.table.done(s)

    def norm_of(self, name: str) -> float:
        slot = self.table.use(name)  # leak: the shortcut for an empty adapter returns without done()
        row = self.table.stack[slot.index]
        if not row.any():
            return 0.0
        value = float(row.float().norm())
        self.table.done(slot)
        return value

    def cancel(self, rid: int) -> None:
        for req in self.active + self.queue:
            if req.rid == rid:
                req.cancelled = True

    def stop(self) -> None:
        self.park(len(self.active))
        self.keep_resident([])
