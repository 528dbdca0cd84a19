from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional

from .allocator import BlockAllocator, FreeList
from .request import Request, Status


class Engine:
    def __init__(self, blocks: int, rows: int, enc_slots: int) -> None:
        self.alloc = BlockAllocator(blocks)
        self.rows = FreeList(rows, "sampling rows")
        self.enc = FreeList(enc_slots, "encoder slots")
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.swapped: Dict[int, List[int]] = {}
        self.probes: Dict[int, int] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    # -- scheduling --------------------------------------------------------
    def schedule(self) -> None:
        while self.waiting:
            req = self.waiting[0]
            ids = self.alloc.reserve(self.alloc.blocks_for(req.length))  # clean: request's table or unreserved when no row is left
            if ids is None:
                break
            row = self.rows.get_or_none()  # clean: moved into the request
            if row is None:
                self.alloc.unreserve(ids)
                break
            self.waiting.popleft()
            req.blocks, req.sampling_row = ids, row
            req.status = Status.RUNNING
            self.running.append(req)

    def schedule_multimodal(self) -> int:
        started = 0
        for _ in range(len(self.waiting)):
            req = self.waiting.popleft()
            slot = self.enc.get_or_none()  # leak: without blocks the request is queued again and the slot is lost
            if slot is None:
                self.waiting.appendleft(req)
                break
            ids = self.alloc.reserve(self.alloc.blocks_for(req.length))  # clean: in the request, or put with it when no row is left
            if ids is None:
                self.waiting.append(req)
                continue
            row = self.rows.get_or_none()  # clean: in the request
            if row is None:
                self.alloc.unreserve(ids)
                self.enc.put(slot)
                self.waiting.append(req)
                continue
            req.blocks, req.encoder_slot, req.sampling_row = ids, slot, row
            req.status = Status.RUNNING
            self.running.append(req)
            started += 1
        return started

    def preempt(self) -> Optional[Request]:
        if not self.running:
            return None
        victim = self.running.pop()
        host = self.alloc.reserve_host(len(victim.blocks))  # clean: table of swapped, unreserved at swap-in or abort
        if host is None:
            self._release(victim)
            victim.output.clear()
            victim.status = Status.WAITING
            self.waiting.appendleft(victim)
            return victim
        self._release(victim)
        self.swapped[victim.rid] = host
        victim.status = Status.SWAPPED
        return victim

    def swap_in(self, req: Request) -> bool:
        host = self.swapped.get(req.rid)
        if host is None:
            return False
        ids = self.alloc.reserve(len(host))  # leak: no sampling row returns False with the blocks
        if ids is None:
            return False
        row = self.rows.get_or_none()  # clean: in the request
        if row is None:
            return False
        req.blocks, req.sampling_row = ids, row
        self.alloc.unreserve_host(self.swapped.pop(req.rid))
        req.status = Status.RUNNING
        self.running.append(req)
        return True

    def step(self) -> List[Request]:
        done: List[Request] = []
        for req in list(self.running):
            if not self.alloc.ensure(req):
                continue
            req.output.append((req.length * 7) % 11)
            if len(req.output) >= req.max_tokens:
                self.running.remove(req)
                req.status = Status.DONE
                self._release(req)
                done.append(req)
        return done

    def _release(self, req: Request) -> None:
        self.alloc.unreserve(req.blocks)
        if req.sampling_row is not None:
            self.rows.put(req.sampling_row)
            req.sampling_row = None
        if req.encoder_slot is not None:
            self.enc.put(req.encoder_slot)
            req.encoder_slot = None

    def abort(self, rid: int) -> bool:
        for req in self.running:
            if req.rid == rid:
                self.running.remove(req)
                self._release(req)
                req.status = Status.ABORTED
                return True
        host = self.swapped.pop(rid, None)
        if host is not None:
            self.alloc.unreserve_host(host)
        return host is not None

    # -- tools ---------------------------------------------------------------
    def embed(self, req: Request) -> Optional[List[int]]:
        """Pooling requests run in one go and never enter ``running``."""
        req.blocks = self.alloc.reserve(self.alloc.blocks_for(req.length)) or []  # clean: near miss, _release empties the request's table
        if not req.blocks:
            return None
        vec = [t % 5 for t in req.prompt]
        self._release(req)
        return vec

    def score(self, req: Request, label: int) -> Optional[float]:
        req.sampling_row = self.rows.get_or_none()  # leak: a label that is not in the prompt returns and the request goes with its row
        if req.sampling_row is None:
            return None
        if label not in req.prompt:
            return None
        s = req.prompt.count(label) / len(req.prompt)
        self._release(req)
        return s

    def start_probe(self, rid: int) -> bool:
        row = self.rows.get_or_none()  # clean: in probes until stop_probe
        if row is None:
            return False
        prev = self.probes.get(rid)
        if prev is not None:
            self.rows.put(prev)
        self.probes[rid] = row
        return True

    def stop_probe(self, rid: int) -> None:
        row = self.probes.pop(rid, None)
        if row is not None:
            self.rows.put(row)

    def warm_up(self, sizes: List[int]) -> int:
        ok = 0
        for n in sizes:
            ids = self.alloc.reserve(n)  # leak: rebound for each size, only the last one is unreserved
            if ids is not None:
                ok += 1
        if sizes and ids is not None:
            self.alloc.unreserve(ids)
        return ok
