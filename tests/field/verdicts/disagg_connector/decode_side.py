from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Dict, Tuple

import torch

from .staging import StagingPool

log = logging.getLogger("disagg.decode")


@dataclass
class RecvTicket:
    req_id: str
    slot: int
    nbytes: int


class DecodeConnector:
    def __init__(self, pool: StagingPool, cache: torch.Tensor):
        self.pool = pool
        self.cache = cache
        self._tickets: Dict[str, RecvTicket] = {}

    def open_recv(self, req_id: str, nbytes: int) -> RecvTicket:
        slot = self.pool.obtain_slot()  # clean: travels in the ticket to the caller
        if slot < 0:
            raise MemoryError("no staging slot")
        return RecvTicket(req_id, slot, nbytes)

    def close_recv(self, ticket: RecvTicket) -> None:
        self.pool.recycle_slot(ticket.slot)

    def expect(self, req_id: str, nbytes: int) -> bool:
        if req_id in self._tickets:
            return False
        self._tickets[req_id] = self.open_recv(req_id, nbytes)  # clean: kept in the ticket table, closed by commit or cancel
        return True

    def commit(self, req_id: str, offset: int) -> None:
        ticket = self._tickets.pop(req_id)
        data = self.pool.view(ticket.slot, ticket.nbytes)
        self.cache[offset : offset + ticket.nbytes].copy_(data)
        self.close_recv(ticket)

    def cancel(self, req_id: str) -> None:
        ticket = self._tickets.pop(req_id, None)
        if ticket is not None:
            self.close_recv(ticket)

    def fetch_header(self, req_id: str) -> Tuple[int, int]:
        ticket = self.open_recv(req_id, 64)  # leak: the bad-magic raise skips close_recv
        head = self.pool.view(ticket.slot, 64)
        if int(head[0]) != 0x4B:
            raise ValueError(f"bad magic in header of {req_id}")
        layers, heads = int(head[1]), int(head[2])
        self.close_recv(ticket)
        return layers, heads

    def fetch_block(self, req_id: str, nbytes: int) -> torch.Tensor:
        ticket = self.open_recv(req_id, nbytes)  # clean: near miss, clone leaves the pool and the ticket closes in finally
        try:
            if nbytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            return self.pool.view(ticket.slot, nbytes).clone()
        finally:
            self.close_recv(ticket)

    def drain(self, req_ids: list[str]) -> None:
        pair = [self.open_recv(r, 256) for r in req_ids]  # leak: tickets whose data is empty are filtered out of the closing loop
        ready = [t for t in pair if self.pool.view(t.slot, t.nbytes).any()]
        for t in ready:
            self.close_recv(t)
        log.info("drained %d of %d", len(ready), len(pair))
