"""KV connector: moves finished prefill blocks from producer to consumer workers."""
from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class StagingBuffer:
    index: int
    data: torch.Tensor


class StagingPool:
    """Fixed number of pinned host buffers."""

    def __init__(self, count: int, block_bytes: int, pin: bool = False):
        self._q: "queue.Queue[StagingBuffer]" = queue.Queue()
        for i in range(count):
            t = torch.empty(block_bytes, dtype=torch.uint8)
            self._q.put(StagingBuffer(i, t.pin_memory() if pin else t))

    def checkout(self, timeout: Optional[float] = None) -> Optional[StagingBuffer]:
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def checkin(self, buf: StagingBuffer) -> None:
        self._q.put(buf)


class P2PConnector:
    def __init__(self, pool: StagingPool, transport: Any, max_retry: int = 3):
        self.pool = pool
        self.transport = transport
        self.max_retry = max_retry
        self.pending: Dict[str, List[StagingBuffer]] = {}
        self.outbox: "queue.Queue[tuple[str, StagingBuffer]]" = queue.Queue()

    # producer side ---------------------------------------------------
    def save_layer(self, req_id: str, layer: int, kv: torch.Tensor) -> bool:
        buf = self.pool.checkout(timeout=1.0)  # clean: goes through the outbox, the sender checks it in
        if buf is None:
            logger.warning("no staging buffer for %s/%d", req_id, layer)
            return False
        raw = kv.contiguous().view(torch.uint8).flatten()
        buf.data[: raw.numel()].copy_(raw)
        self.outbox.put((req_id, buf))
        return True

    def sender_loop(self, stop: threading.Event) -> None:
        while not stop.is_set() or not self.outbox.empty():
            try:
                req_id, buf = self.outbox.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                self.transport.send(req_id, buf.data)
            finally:
                self.pool.checkin(buf)

    def send_now(self, req_id: str, payload: bytes) -> bool:
        buf = self.pool.checkout()  # leak: when all retries fail the function returns False with the buffer out
        if buf is None:
            return False
        view = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        buf.data[: len(payload)].copy_(view)
        for attempt in range(self.max_retry):
            if self.transport.try_send(req_id, buf.data[: len(payload)]):
                self.pool.checkin(buf)
                return True
            logger.info("send attempt %d failed for %s", attempt, req_id)
        return False

    def send_with_fallback(self, req_id: str, payload: bytes) -> bool:
        buf = self.pool.checkout()  # clean: near miss, one checkin after the loop serves break and exhaustion
        if buf is None:
            return self.transport.send_inline(req_id, payload)
        ok = False
        for _ in range(self.max_retry):
            ok = self.transport.try_send(req_id, buf.data)
            if ok:
                break
        self.pool.checkin(buf)
        return ok

    # consumer side ---------------------------------------------------
    def start_load(self, req_id: str, num_layers: int) -> None:
        bufs = []
        for layer in range(num_layers):
            b = self.pool.checkout()  # leak: with a buffer short, those collected so far are lost at the return
            if b is None:
                logger.error("start_load(%s): only %d of %d buffers", req_id, layer, num_layers)
                return
            bufs.append(b)
        self.pending[req_id] = bufs
        self.transport.post_recv(req_id, [b.data for b in bufs])

    def wait_for_layer(self, req_id: str, layer: int) -> torch.Tensor:
        buf = self.pending[req_id][layer]
        self.transport.wait(req_id, layer)
        return buf.data

    def finish_load(self, req_id: str) -> None:
        for b in self.pending.pop(req_id, ()):
            self.pool.checkin(b)

    def fetch_meta(self, req_id: str) -> Optional[Dict[str, Any]]:
        buf = self.pool.checkout(timeout=0.5)  # leak: the swallowed decode error ends without a checkin
        if buf is None:
            return None
        try:
            n = self.transport.recv_meta(req_id, buf.data)
            meta = self.transport.decode(buf.data[:n])
            self.pool.checkin(buf)
            return meta
        except ValueError as e:
            logger.debug("bad metadata for %s: %s", req_id, e)
        return None

    def ping(self, peer: str) -> bool:
        buf = self.pool.checkout()  # clean: near miss, the handler sets a flag and the checkin follows
        if buf is None:
            return False
        alive = True
        try:
            self.transport.ping(peer, buf.data[:8])
        except OSError:
            alive = False
        self.pool.checkin(buf)
        return alive
