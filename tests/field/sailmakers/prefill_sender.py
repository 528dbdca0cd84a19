"""Prefill side of disaggregated serving: pushes KV pages to the decode instance over RDMA."""
import heapq
import logging
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, NamedTuple, Optional

import torch

logger = logging.getLogger("prefill.sender")

MAX_ATTEMPTS = 4


class KVTransferError(Exception):
    def __init__(self, room: int, why: str):
        super().__init__(f"room {room}: {why}")
        self.room = room


class Chunk(NamedTuple):
    room: int
    pages: List[int]
    dst: List[int]
    last: bool


class StagingRing:
    """Registered bounce buffers; the lowest offset goes out first so that the NIC keeps its translation cache warm."""

    def __init__(self, base: torch.Tensor, nslots: int):
        self.slot_bytes = base.numel() // nslots
        self.base = base
        self._heap = list(range(nslots))
        heapq.heapify(self._heap)
        self._cv = threading.Condition()

    def checkout(self, timeout: float = 1.0) -> Optional[int]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._heap, timeout):
                return None
            return heapq.heappop(self._heap)  # clean: returned to the caller

    def checkout_pair(self, timeout: float = 1.0):
        a = self.checkout(timeout)  # leak: not put back when the second slot times out
        if a is None:
            return None
        b = self.checkout(timeout)  # clean: handed to the caller, on None nothing was taken
        if b is None:
            return None
        return a, b

    def checkin(self, slot: int) -> None:
        with self._cv:
            heapq.heappush(self._heap, slot)
            self._cv.notify()

    def view(self, slot: int) -> torch.Tensor:
        off = slot * self.slot_bytes
        return self.base[off:off + self.slot_bytes]


class QueuePairPool:
    def __init__(self, engine, peers: Dict[str, int]):
        self.engine = engine
        self._idle: Dict[str, "queue.SimpleQueue"] = {p: queue.SimpleQueue() for p in peers}
        for peer, n in peers.items():
            for _ in range(n):
                self._idle[peer].put(engine.connect(peer))  # clean: put in the idle queue

    def borrow(self, peer: str):
        while True:
            try:
                qp = self._idle[peer].get(timeout=0.5)  # clean: near miss, a dead one is destroyed and replaced
            except queue.Empty:
                return None
            if qp.alive():
                return qp
            self.engine.destroy(qp)
            self._idle[peer].put(self.engine.connect(peer))  # clean: put in the idle queue

    def hand_back(self, peer: str, qp) -> None:
        self._idle[peer].put(qp)


class PrefillSender:
    def __init__(self, engine, ring: StagingRing, qps: QueuePairPool, kv: torch.Tensor, workers: int = 4):
        self.engine, self.ring, self.qps, self.kv = engine, ring, qps, kv
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="kv-send")
        self.inflight: Dict[int, int] = {}
        self.failed: Dict[int, str] = {}
        self._lock = threading.Lock()
        self._window = threading.BoundedSemaphore(32)

    def _gather(self, slot: int, pages: List[int]) -> int:
        view = self.ring.view(slot)
        src = self.kv[pages].reshape(-1).view(torch.uint8)
        view[:src.numel()].copy_(src)
        return src.numel()

    def send_chunk(self, peer: str, chunk: Chunk) -> bool:
        slot = self.ring.checkout()  # clean: checked in in finally
        if slot is None:
            return False
        try:
            n = self._gather(slot, chunk.pages)
            qp = self.qps.borrow(peer)  # leak: not handed back when the peer has been marked failed
            if qp is None:
                return False
            if chunk.room in self.failed:
                logger.info("room %d already failed", chunk.room)
                return False
            ok = qp.write(self.ring.view(slot)[:n], chunk.dst)
            self.qps.hand_back(peer, qp)
            return ok
        finally:
            self.ring.checkin(slot)

    def send_with_retry(self, peer: str, chunk: Chunk) -> None:
        for attempt in range(MAX_ATTEMPTS):
            slot = self.ring.checkout(timeout=0.2 * (attempt + 1))  # leak: each failed attempt takes another slot
            if slot is None:
                continue
            n = self._gather(slot, chunk.pages)
            if self.engine.post(peer, slot, n, chunk.dst):
                self.ring.checkin(slot)
                return
            time.sleep(0.01 * 2 ** attempt)
        raise KVTransferError(chunk.room, "retries exhausted")

    def post_async(self, peer: str, chunk: Chunk) -> Optional[Future]:
        if not self._window.acquire(timeout=2.0):  # clean: near miss, released by the done callback or when no slot
            return None
        slot = self.ring.checkout()  # clean: checked in by the done callback
        if slot is None:
            self._window.release()
            return None
        n = self._gather(slot, chunk.pages)
        fut = self.pool.submit(self.engine.post, peer, slot, n, chunk.dst)

        def _done(f: Future, slot=slot, room=chunk.room):
            self.ring.checkin(slot)
            self._window.release()
            if f.exception() is not None or not f.result():
                with self._lock:
                    self.failed[room] = "post failed"

        fut.add_done_callback(_done)
        return fut

    def post_tracked(self, peer: str, chunk: Chunk) -> bool:
        slot = self.ring.checkout()  # leak: poll() forgets the slot of a failed room
        if slot is None:
            return False
        n = self._gather(slot, chunk.pages)
        handle = self.engine.post_nowait(peer, slot, n, chunk.dst)
        with self._lock:
            self.inflight[handle] = slot
        return True

    def poll(self) -> int:
        done = 0
        for handle, room, status in self.engine.completions():
            with self._lock:
                slot = self.inflight.pop(handle, None)
            if slot is None:
                continue
            if status < 0:
                self.failed[room] = f"status {status}"
                continue
            self.ring.checkin(slot)
            done += 1
        return done

    def send_pair(self, peer: str, k_pages: List[int], v_pages: List[int], dst: List[int]) -> bool:
        pair = self.ring.checkout_pair()  # clean: both checked in in finally
        if pair is None:
            return False
        k, v = pair
        try:
            nk, nv = self._gather(k, k_pages), self._gather(v, v_pages)
            return self.engine.post2(peer, (k, nk), (v, nv), dst)
        finally:
            self.ring.checkin(k)
            self.ring.checkin(v)

    def mark_failed(self, room: int, why: str) -> None:
        self._lock.acquire()  # leak: not released when the room is already in failed
        if room in self.failed:
            return
        self.failed[room] = why
        self._lock.release()

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for peer, q in self.qps._idle.items():
            while not q.empty():
                self.engine.destroy(q.get())  # clean: destroyed at once
