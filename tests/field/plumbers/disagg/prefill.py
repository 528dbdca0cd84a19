"""Producer: stages KV layer by layer and pushes it to the decode worker."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List

from .conns import ConnPool, CreditWindow, send_with_retry
from .staging import StagingBuffer, StagingPool


@dataclass
class PrefillReq:
    rid: str
    peer: str
    layers: List[bytes]
    staged: List[StagingBuffer] = field(default_factory=list)
    cancelled: bool = False


class KVProducer:
    def __init__(self, pool: StagingPool, conns: ConnPool, window: CreditWindow) -> None:
        self.pool = pool
        self.conns = conns
        self.window = window
        self.inflight: Dict[str, PrefillReq] = {}

    def stage(self, req: PrefillReq) -> bool:
        for layer in req.layers:
            buf = self.pool.reserve()  # clean: near miss, on shortage the request gives back what it holds
            if buf is None:
                self._unstage(req)
                return False
            buf.payload, buf.length = layer, len(layer)
            req.staged.append(buf)
        self.inflight[req.rid] = req
        return True

    def _unstage(self, req: PrefillReq) -> None:
        while req.staged:
            self.pool.unreserve(req.staged.pop())

    def push(self, rid: str) -> bool:
        req = self.inflight.get(rid)
        if req is None:
            return False
        size = sum(b.length for b in req.staged)
        if not self.window.take_credit(size):  # leak: a cancelled request returns before the credit does
            return False
        if req.cancelled:
            self._unstage(self.inflight.pop(rid))
            return False
        ok = all(send_with_retry(self.conns, req.peer, b.payload, 3) for b in req.staged)
        self.window.return_credit(size)
        if ok:
            self._unstage(self.inflight.pop(rid))
        return ok

    def push_layer(self, peer: str, keys: bytes, values: bytes) -> bool:
        pair = self.pool.reserve_pair()  # clean: both go back after the send
        if pair is None:
            return False
        k, v = pair
        k.payload, v.payload = keys, values
        sent = send_with_retry(self.conns, peer, k.payload + v.payload, 2)
        self.pool.unreserve(k)
        self.pool.unreserve(v)
        return sent

    def push_mla(self, peer: str, latent: bytes) -> bool:
        """MLA has one latent cache instead of keys and values."""
        pair = self.pool.reserve_pair()  # leak: the second of the pair is never returned
        if pair is None:
            return False
        buf = pair[0]
        buf.payload = latent
        sent = send_with_retry(self.conns, peer, buf.payload, 2)
        self.pool.unreserve(buf)
        return sent

    def probe(self, peer: str, nbytes: int) -> bool:
        if not self.window.take_credit(nbytes):  # clean: returned after the send
            return False
        with self.pool.scratch() as buf:  # clean: with
            ok = buf is not None and send_with_retry(self.conns, peer, b"\0" * nbytes, 1)
        self.window.return_credit(nbytes)
        return ok

    def cancel(self, rid: str, at_next_push: bool = False) -> None:
        req = self.inflight.get(rid)
        if req is None:
            return
        req.cancelled = True
        if not at_next_push:
            self._unstage(self.inflight.pop(rid))
