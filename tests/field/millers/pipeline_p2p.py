"""Point-to-point activation exchange for the 1F1B pipeline schedule."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional, Set, Tuple


class BufferTimeout(RuntimeError):
    pass


class PeerReset(ConnectionError):
    pass


@dataclass
class WireBuffer:
    index: int
    data: bytearray
    filled: int = 0

    def pack(self, payload: bytes) -> None:
        self.data[: len(payload)] = payload
        self.filled = len(payload)

    def unpack(self) -> bytes:
        return bytes(self.data[: self.filled])


class WireBufferPool:
    """Fixed set of registered buffers; registration with the NIC is what makes them scarce."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: Deque[WireBuffer] = deque(WireBuffer(i, bytearray(nbytes)) for i in range(count))
        self._cond = threading.Condition()

    def acquire(self, timeout: Optional[float] = 30.0) -> WireBuffer:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                raise BufferTimeout(f"no wire buffer within {timeout}s")
            return self._free.popleft()

    def try_acquire(self) -> Optional[WireBuffer]:
        with self._cond:
            return self._free.popleft() if self._free else None

    def release(self, buf: WireBuffer) -> None:
        with self._cond:
            buf.filled = 0
            self._free.append(buf)
            self._cond.notify()

    def available(self) -> int:
        with self._cond:
            return len(self._free)


@dataclass
class Work:
    status: str = "done"

    def wait(self) -> str:
        return self.status


class LoopbackTransport:
    """Stand-in for the NCCL/UCX backend used in unit tests."""

    def __init__(self) -> None:
        self._boxes: Dict[Tuple[int, int], Deque[bytes]] = {}
        self.cancelled: Set[int] = set()

    def isend(self, buf: WireBuffer, peer: int, tag: int) -> Work:
        self._boxes.setdefault((peer, tag), deque()).append(buf.unpack())
        return Work()

    def irecv(self, buf: WireBuffer, peer: int, tag: int) -> Work:
        if tag in self.cancelled:
            return Work("cancelled")
        box = self._boxes.get((peer, tag))
        if box:
            buf.pack(box.popleft())
        return Work()


@dataclass
class StageEndpoint:
    rank: int
    prev_rank: int
    next_rank: int
    pool: WireBufferPool
    transport: LoopbackTransport
    _inflight: Deque[Tuple[Work, WireBuffer]] = field(default_factory=deque)
    _posted_act: Optional[Tuple[Work, WireBuffer]] = None
    _posted_grad: Optional[Tuple[Work, WireBuffer]] = None

    def send_forward(self, act: bytes, micro: int) -> None:
        buf = self.pool.acquire()  # clean: queued in _inflight, drained by drain_sends
        buf.pack(act)
        self._inflight.append((self.transport.isend(buf, self.next_rank, micro), buf))

    def send_backward(self, grad: Optional[bytes], micro: int) -> bool:
        buf = self.pool.acquire()  # leak: the frozen stage (grad is None) returns before the buffer is queued
        if grad is None:
            return False
        buf.pack(grad)
        self._inflight.append((self.transport.isend(buf, self.prev_rank, micro), buf))
        return True

    def drain_sends(self) -> None:
        while self._inflight:
            work, buf = self._inflight.popleft()
            work.wait()
            self.pool.release(buf)

    def recv_forward(self, micro: int) -> Optional[bytes]:
        buf = self.pool.acquire()  # leak: cancelled receive returns None without release
        work = self.transport.irecv(buf, self.prev_rank, micro)
        if work.wait() == "cancelled":
            return None
        act = buf.unpack()
        self.pool.release(buf)
        return act

    def recv_backward(self, micro: int) -> Optional[bytes]:
        buf = self.pool.acquire()  # clean: released in finally on every return
        try:
            work = self.transport.irecv(buf, self.next_rank, micro)
            if work.wait() == "cancelled":
                return None
            return buf.unpack()
        finally:
            self.pool.release(buf)

    def exchange(self, act: bytes, micro: int) -> Optional[bytes]:
        """Combined send-forward / recv-backward of the steady state."""
        out = self.pool.acquire()  # leak: not given back when the second buffer is unavailable
        inb = self.pool.try_acquire()  # clean: released after unpack, None otherwise
        if inb is None:
            return None
        out.pack(act)
        send = self.transport.isend(out, self.next_rank, micro)
        recv = self.transport.irecv(inb, self.next_rank, micro + 1)
        send.wait()
        recv.wait()
        grad = inb.unpack()
        self.pool.release(out)
        self.pool.release(inb)
        return grad

    def exchange_reverse(self, grad: bytes, micro: int) -> Optional[bytes]:
        out = self.pool.try_acquire()  # clean: near miss, rolled back when the second one is missing
        inb = self.pool.try_acquire() if out is not None else None  # clean: released after unpack
        if out is None or inb is None:
            if out is not None:
                self.pool.release(out)
            return None
        out.pack(grad)
        send = self.transport.isend(out, self.prev_rank, micro)
        recv = self.transport.irecv(inb, self.prev_rank, micro + 1)
        for work, buf in ((recv, inb), (send, out)):
            work.wait()
        act = inb.unpack()
        for buf in (inb, out):
            self.pool.release(buf)
        return act

    def post_act(self, micro: int) -> None:
        """Post the next activation receive early so that it overlaps the current compute."""
        buf = self.pool.acquire()  # leak: a second post_act before take_act overwrites the posted buffer
        self._posted_act = (self.transport.irecv(buf, self.prev_rank, micro), buf)

    def take_act(self) -> Optional[bytes]:
        if self._posted_act is None:
            return None
        (work, buf), self._posted_act = self._posted_act, None
        work.wait()
        act = buf.unpack()
        self.pool.release(buf)
        return act

    def post_grad(self, micro: int) -> None:
        if self._posted_grad is not None:
            work, stale = self._posted_grad
            work.wait()
            self.pool.release(stale)
        buf = self.pool.acquire()  # clean: near miss, the previously posted one is given back first
        self._posted_grad = (self.transport.irecv(buf, self.next_rank, micro), buf)

    def take_grad(self) -> Optional[bytes]:
        posted, self._posted_grad = self._posted_grad, None
        if posted is None:
            return None
        work, buf = posted
        work.wait()
        grad = buf.unpack()
        self.pool.release(buf)
        return grad

    def close(self) -> None:
        self.drain_sends()
        self.take_act()
        self.take_grad()


def run_warmup(stage: StageEndpoint, micros: Iterable[int], skip: Set[int]) -> List[bytes]:
    acts = []
    for micro in micros:
        stage.post_act(micro)
        if micro in skip:
            continue
        acts.append(stage.take_act())
    stage.drain_sends()
    return acts


def broadcast_shape(stage: StageEndpoint, dims: Tuple[int, ...], retries: int = 3) -> bool:
    payload = ",".join(map(str, dims)).encode()
    for _ in range(retries):
        buf = stage.pool.acquire()  # leak: PeerReset is swallowed and the next attempt takes a new buffer
        try:
            buf.pack(payload)
            stage.transport.isend(buf, stage.next_rank, tag=-1).wait()
            stage.pool.release(buf)
            return True
        except PeerReset:
            continue
    return False


def probe_link(stage: StageEndpoint, retries: int = 3) -> bool:
    ok = False
    for _ in range(retries):
        buf = stage.pool.acquire()  # clean: near miss, both the break and the retry pass the release
        try:
            buf.pack(b"ping")
            stage.transport.isend(buf, stage.next_rank, tag=-2).wait()
            ok = True
        except PeerReset:
            ok = False
        stage.pool.release(buf)
        if ok:
            break
    return ok


def main() -> None:
    pool = WireBufferPool(8, 64)
    stage = StageEndpoint(0, 0, 0, pool, LoopbackTransport())
    stage.send_forward(b"abc", 0)
    stage.drain_sends()
    assert stage.recv_forward(0) == b"abc"
    stage.post_grad(1)
    stage.post_grad(2)
    assert stage.exchange(b"q", 4) is not None
    assert stage.exchange_reverse(b"q", 4) is not None
    assert probe_link(stage) and broadcast_shape(stage, (1, 2))
    stage.close()
    print(pool.available())


if __name__ == "__main__":
    main()
