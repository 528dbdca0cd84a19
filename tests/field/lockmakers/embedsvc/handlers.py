from __future__ import annotations

import logging

import torch

from .batcher import Batcher
from .helpers import send_all, send_if_alive
from .pools import ArenaPool, ClientPool, PoolDry

log = logging.getLogger(__name__)


class Handlers:
    def __init__(self, arena: ArenaPool, clients: ClientPool, batcher: Batcher):
        self.arena = arena
        self.clients = clients
        self.batcher = batcher

    def index(self, addr: str, ids: list[int], rows: list[list[int]]) -> bool:
        vecs = self.batcher.run_now(rows)
        if vecs is None:
            return False
        client = self.clients.dial(addr)  # clean: near miss, send_all hangs up on every way
        if client is None:
            return False
        return send_all(self.clients, client, ids, vecs)

    def index_fast(self, addr: str, ids: list[int], vecs: torch.Tensor) -> bool:
        client = self.clients.dial(addr)  # leak: send_if_alive returns False for a dead client without hanging up
        if client is None:
            return False
        return send_if_alive(self.clients, client, ids, vecs)

    def query(self, addr: str, vec: torch.Tensor, k: int) -> list[int]:
        with self.clients.dialed(addr) as c:  # clean: context manager
            return c.query(vec, k)

    def query_all(self, vec: torch.Tensor, k: int) -> list[int]:
        hits: list[int] = []
        for addr in self.clients.addrs:
            c = self.clients.dial(addr)  # leak: an empty answer goes on to the next shard without hang_up
            if c is None:
                continue
            part = c.query(vec, k)
            if not part:
                log.debug("shard %s has nothing", addr)
                continue
            hits += part
            self.clients.hang_up(c)
        return hits[:k]

    def rerank(self, cand: torch.Tensor, vec: torch.Tensor) -> torch.Tensor | None:
        try:
            work = self.arena.lend_or_raise(cand.shape[0], cand.shape[1])  # leak: no candidates left after the mask returns None without repay
        except PoolDry:
            return None
        torch.mul(cand, vec, out=work)
        keep = work.sum(1) > 0
        if not keep.any():
            return None
        order = work[keep].sum(1).argsort(descending=True)
        self.arena.repay(work)
        return order

    def scores(self, cand: torch.Tensor, vec: torch.Tensor) -> list[float]:
        work = self.arena.lend_best(cand.shape[0], [cand.shape[1]])  # clean: repaid after the product when not None
        if work is None:
            return (cand @ vec).tolist()
        out = torch.mul(cand, vec, out=work).sum(1).tolist()
        self.arena.repay(work)
        return out
