"""Moves KV pages between hosts over registered staging buffers."""
from __future__ import annotations

import itertools
import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch

log = logging.getLogger(__name__)
_ids = itertools.count(1)


class StagingPool:
    """Pinned host buffers of one size, registered once with the NIC."""

    def __init__(self, count: int, nbytes: int, pin: bool = True):
        self.nbytes = nbytes
        self._q: "queue.Queue[torch.Tensor]" = queue.Queue()
        for _ in range(count):
            buf = torch.empty(nbytes, dtype=torch.uint8)
            self._q.put(buf.pin_memory() if pin else buf)

    def lend(self, timeout: Optional[float] = None) -> torch.Tensor:
        return self._q.get(timeout=timeout)

    def try_lend(self) -> Optional[torch.Tensor]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def restore(self, buf: torch.Tensor) -> None:
        self._q.put(buf)


class QueuePairs:
    """A fixed number of queue pairs for each peer."""

    def __init__(self, per_peer: int):
        self.per_peer = per_peer
        self._idle: Dict[str, List[int]] = {}
        self._lock = threading.Lock()

    def grab(self, peer: str) -> Optional[int]:
        with self._lock:
            idle = self._idle.setdefault(peer, list(range(self.per_peer)))
            return idle.pop() if idle else None

    def ungrab(self, peer: str, qp: int) -> None:
        with self._lock:
            self._idle[peer].append(qp)


@dataclass
class Transfer:
    tid: int
    peer: str
    qp: int
    buf: torch.Tensor
    length: int
    on_done: Optional[Callable[[bool], None]] = None


class TransferError(RuntimeError):
    pass


class Wire:
    """Thin binding of the verbs library."""

    def post(self, peer: str, qp: int, buf: torch.Tensor, length: int) -> int:
        raise NotImplementedError

    def reachable(self, peer: str) -> bool:
        raise NotImplementedError

    def wait(self, wr: int) -> bool:
        raise NotImplementedError


class TransferEngine:
    def __init__(self, wire: Wire, staging: StagingPool, qps: QueuePairs, workers: int = 4):
        self.wire = wire
        self.staging = staging
        self.qps = qps
        self.pool = ThreadPoolExecutor(workers)
        self.inflight: Dict[int, Transfer] = {}

    # -- synchronous ---------------------------------------------------------

    def push(self, peer: str, page: torch.Tensor) -> bool:
        buf = self.staging.lend()  # clean: restored in finally
        try:
            n = page.numel() * page.element_size()
            buf[:n].copy_(page.reshape(-1).view(torch.uint8))
            qp = self.qps.grab(peer)  # leak: not returned when the post is refused
            if qp is None:
                return False
            wr = self.wire.post(peer, qp, buf, n)
            if wr < 0:
                log.error("post to %s refused: %d", peer, wr)
                return False
            ok = self.wire.wait(wr)
            self.qps.ungrab(peer, qp)
            return ok
        finally:
            self.staging.restore(buf)

    def pull(self, peer: str, out: torch.Tensor) -> bool:
        qp = self.qps.grab(peer)  # clean: every return after the grab goes through finally
        if qp is None:
            return False
        try:
            buf = self.staging.try_lend()  # clean: restored on both outcomes of the wait
            if buf is None:
                return False
            wr = self.wire.post(peer, qp, buf, out.numel())
            if not self.wire.wait(wr):
                self.staging.restore(buf)
                return False
            out.view(-1).copy_(buf[: out.numel()])
            self.staging.restore(buf)
            return True
        finally:
            self.qps.ungrab(peer, qp)

    def push_retry(self, peer: str, page: torch.Tensor, attempts: int = 3) -> bool:
        for i in range(attempts):
            buf = self.staging.lend()  # leak: a failed attempt lends another buffer for the next one
            n = page.numel()
            buf[:n].copy_(page.view(-1))
            try:
                self._send(peer, buf, n)
            except TransferError as e:
                log.info("attempt %d to %s failed: %s", i, peer, e)
                continue
            self.staging.restore(buf)
            return True
        return False

    def push_retry_reuse(self, peer: str, page: torch.Tensor, attempts: int = 3) -> bool:
        buf = None
        try:
            for i in range(attempts):
                if buf is None:
                    buf = self.staging.lend()  # clean: near miss, lent once and restored in finally
                n = page.numel()
                buf[:n].copy_(page.view(-1))
                try:
                    self._send(peer, buf, n)
                    return True
                except TransferError:
                    continue
            return False
        finally:
            if buf is not None:
                self.staging.restore(buf)

    def _send(self, peer: str, buf: torch.Tensor, n: int) -> None:
        qp = self.qps.grab(peer)  # clean: ungrabbed before the status is judged
        if qp is None:
            raise TransferError("no queue pair")
        ok = self.wire.wait(self.wire.post(peer, qp, buf, n))
        self.qps.ungrab(peer, qp)
        if not ok:
            raise TransferError(f"write to {peer} not acknowledged")

    # -- asynchronous --------------------------------------------------------

    def push_async(self, peer: str, page: torch.Tensor, on_done=None) -> int:
        qp = self.qps.grab(peer)  # clean: carried by the Transfer until _complete()
        if qp is None:
            return 0
        buf = self.staging.try_lend()  # clean: carried by the Transfer until _complete()
        if buf is None:
            self.qps.ungrab(peer, qp)
            return 0
        n = page.numel()
        buf[:n].copy_(page.view(-1))
        t = Transfer(next(_ids), peer, qp, buf, n, on_done)
        self.inflight[t.tid] = t
        fut = self.pool.submit(self._drive, t)
        fut.add_done_callback(lambda f, t=t: self._complete(t, f))
        return t.tid

    def _drive(self, t: Transfer) -> bool:
        return self.wire.wait(self.wire.post(t.peer, t.qp, t.buf, t.length))

    def _complete(self, t: Transfer, fut: Future) -> None:
        self.inflight.pop(t.tid, None)
        self.staging.restore(t.buf)
        self.qps.ungrab(t.peer, t.qp)
        ok = fut.exception() is None and fut.result()
        if t.on_done is not None:
            t.on_done(ok)

    def notify(self, peer: str, payload: bytes) -> None:
        buf = self.staging.lend()  # leak: the callback restores only when the send succeeded
        buf[: len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

        def finished(f: Future) -> None:
            if f.exception() is not None:
                log.warning("notify %s: %s", peer, f.exception())
                return
            self.staging.restore(buf)

        self.pool.submit(self._send, peer, buf, len(payload)).add_done_callback(finished)

    def broadcast(self, peers: Sequence[str], page: torch.Tensor) -> List[str]:
        sent: List[str] = []
        for peer in peers:
            buf = self.staging.lend()  # leak: unreachable peers are skipped with the buffer out
            if not self.wire.reachable(peer):
                log.info("%s unreachable", peer)
                continue
            buf[: page.numel()].copy_(page.view(-1))
            if self.push_from(peer, buf, page.numel()):
                sent.append(peer)
        return sent

    def push_from(self, peer: str, buf: torch.Tensor, n: int) -> bool:
        """Takes over buf: it is restored here whatever happens."""
        try:
            self._send(peer, buf, n)
            return True
        except TransferError:
            return False
        finally:
            self.staging.restore(buf)

    def scatter(self, work: Sequence[Tuple[str, torch.Tensor]]) -> int:
        bufs = [self.staging.lend() for _ in work]  # clean: near miss, each is consumed by push_from
        done = 0
        for (peer, page), buf in zip(work, bufs):
            buf[: page.numel()].copy_(page.view(-1))
            done += self.push_from(peer, buf, page.numel())
        return done

    def snapshot(self, page: torch.Tensor) -> torch.Tensor:
        """Host copy of a page for the debug dump."""
        staged = self._stage(page)  # leak: the staged buffer is cloned and dropped
        return staged[: page.numel()].clone()

    def close(self) -> None:
        self.pool.shutdown(wait=True)

    def _stage(self, page: torch.Tensor) -> torch.Tensor:
        buf = self.staging.lend()  # clean: returned to the caller
        buf[: page.numel()].copy_(page.view(-1))
        return buf
