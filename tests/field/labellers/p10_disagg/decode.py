"""Decode side: preallocation, transfer and retraction."""
from __future__ import annotations

from typing import Callable, Dict, List

from .pools import DisaggReq, RowPool, TokenSlotAllocator


class DecodeSide:
    def __init__(self, rows: RowPool, tokens: TokenSlotAllocator, reserved: int) -> None:
        self.rows = rows
        self.tokens = tokens
        self.reserved = reserved
        self.transfers: Dict[str, DisaggReq] = {}
        self.running: List[DisaggReq] = []

    def preallocate(self, queue: List[DisaggReq]) -> List[DisaggReq]:
        taken: List[DisaggReq] = []
        for req in queue:
            if len(self.tokens.free_slots) - req.length < self.reserved:
                break
            row = self.rows.alloc()  # clean: near miss, given back before the break when no slots are left
            if row is None:
                break
            slots = self.tokens.alloc(req.length)  # clean: moved into the request and the transfer table
            if slots is None:
                self.rows.dealloc(row)
                break
            req.row, req.slots = row, slots
            self.transfers[req.rid] = req
            taken.append(req)
        return taken

    def _release(self, req: DisaggReq) -> None:
        self.tokens.dealloc(req.slots)
        self.rows.dealloc(req.row)
        req.slots, req.row = [], -1

    def poll(self, status: Callable[[str], str]) -> None:
        for rid in list(self.transfers):
            state = status(rid)
            if state == "pending":
                continue
            req = self.transfers.pop(rid)
            if state == "failed":
                self._release(req)
                continue
            self.running.append(req)

    def decode_step(self, eos: Callable[[DisaggReq], bool]) -> int:
        alive: List[DisaggReq] = []
        for req in self.running:
            new = self.tokens.alloc(1)  # leak: a request that ends in this step is released without the new slot
            if new is None:
                self._release(req)
                continue
            if eos(req):
                self._release(req)
                continue
            req.slots = req.slots + new
            alive.append(req)
        self.running = alive
        return len(alive)

    def verify_step(self, req: DisaggReq, width: int, accept: Callable[[List[int]], int]) -> int:
        spec = self.tokens.alloc(width)  # clean: near miss, split between the request and dealloc within a free group
        if spec is None:
            return 0
        self.tokens.group_begin()
        n = accept(spec)
        req.slots.extend(spec[:n])
        self.tokens.dealloc(spec[n:])
        self.tokens.group_end()
        return n

    def dummy_run(self, length: int, forward: Callable[[List[int]], None]) -> bool:
        slots = self.tokens.alloc(length)  # clean: deallocated after the forward
        if slots is None:
            return False
        forward(slots)
        self.tokens.dealloc(slots)
        return True

    def measure(self, lengths: List[int], forward: Callable[[List[int]], float]) -> float:
        best, slots = 0.0, None
        for length in lengths:
            slots = self.tokens.alloc(length)  # leak: each round rebinds slots, only the last ones are deallocated
            if slots is None:
                break
            best = max(best, forward(slots))
        if slots is not None:
            self.tokens.dealloc(slots)
        return best
