"""CUDA streams from per-device pools, with overlapped kernels on top."""
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional

import torch


class StreamLease(NamedTuple):
    device: int
    stream: torch.cuda.Stream


class StreamPool:
    def __init__(self, device: int, n: int) -> None:
        self.device = device
        self._idle: "queue.Queue[torch.cuda.Stream]" = queue.Queue()
        for _ in range(n):
            self._idle.put(torch.cuda.Stream(device))

    def lend(self, timeout: Optional[float] = None) -> StreamLease:
        return StreamLease(self.device, self._idle.get(timeout=timeout))  # clean: wrapped and returned

    def lend_nowait(self) -> Optional[StreamLease]:
        try:
            return StreamLease(self.device, self._idle.get_nowait())  # clean: wrapped and returned
        except queue.Empty:
            return None

    def reclaim(self, lease: StreamLease) -> None:
        self._idle.put(lease.stream)

    @contextmanager
    def stream(self) -> Iterator[torch.cuda.Stream]:
        lease = self.lend()  # clean: reclaimed in finally
        try:
            with torch.cuda.stream(lease.stream):
                yield lease.stream
        finally:
            self.reclaim(lease)


class OverlapRunner:
    """Runs kernels on borrowed streams and joins them onto the main one."""

    def __init__(self, streams: StreamPool) -> None:
        self.streams = streams
        self._open: Dict[str, StreamLease] = {}

    def fork(self, name: str) -> torch.cuda.Stream:
        if name in self._open:
            return self._open[name].stream
        lease = self.streams.lend()  # clean: near miss, an open name returned above, join reclaims
        self._open[name] = lease
        return lease.stream

    def refork(self, name: str) -> torch.cuda.Stream:
        self._open[name] = self.streams.lend()  # leak: the lease open under the same name is overwritten
        return self._open[name].stream

    def join(self, name: str) -> None:
        lease = self._open.pop(name, None)  # clean: reclaimed when present
        if lease is None:
            return
        torch.cuda.current_stream().wait_stream(lease.stream)
        self.streams.reclaim(lease)

    def join_all(self) -> None:
        for name in list(self._open):
            self.join(name)

    def run_group(self, fns: List[Callable[[], torch.Tensor]]) -> List[torch.Tensor]:
        out = []
        with ExitStack() as stack:
            for fn in fns:
                lease = self.streams.lend_nowait()  # clean: near miss, the exit stack reclaims each one
                if lease is None:
                    out.append(fn())
                    continue
                stack.callback(self.streams.reclaim, lease)
                with torch.cuda.stream(lease.stream):
                    out.append(fn())
        return out


class BackgroundCopier:
    def __init__(self, streams: StreamPool, workers: int = 2) -> None:
        self.streams = streams
        self.exec = ThreadPoolExecutor(workers)
        self._sem = threading.Semaphore(workers * 2)

    def submit(self, src: torch.Tensor, dst: torch.Tensor) -> "Future[None]":
        lease = self.streams.lend()  # clean: near miss, the done callback reclaims it
        fut = self.exec.submit(self._copy, lease, src, dst)
        fut.add_done_callback(lambda _f: self.streams.reclaim(lease))
        return fut

    def _copy(self, lease: StreamLease, src: torch.Tensor, dst: torch.Tensor) -> None:
        with torch.cuda.stream(lease.stream):
            dst.copy_(src, non_blocking=True)
        lease.stream.synchronize()

    def try_copy(self, src: torch.Tensor, dst: torch.Tensor) -> bool:
        if not self._sem.acquire(blocking=False):  # leak: returns without release when no stream is idle
            return False
        lease = self.streams.lend_nowait()  # clean: reclaimed after the copy
        if lease is None:
            return False
        self._copy(lease, src, dst)
        self.streams.reclaim(lease)
        self._sem.release()
        return True

    def copy_retry(self, src: torch.Tensor, dst: torch.Tensor, tries: int) -> bool:
        for _ in range(tries):
            lease = self.streams.lend()  # leak: a failed attempt goes round again with another stream
            try:
                self._copy(lease, src, dst)
            except RuntimeError:
                continue
            self.streams.reclaim(lease)
            return True
        return False


def split_attention(streams: StreamPool, q, k, v, parts: int) -> torch.Tensor:
    outs, leases = [], []
    for qc in q.chunk(parts, dim=2):
        lease = streams.lend_nowait()  # leak: only the last lease is reclaimed after the loop
        if lease is None:
            break
        leases.append(lease)
        with torch.cuda.stream(lease.stream):
            outs.append(torch.softmax(qc @ k.transpose(-2, -1), dim=-1) @ v)
    for lease in leases:
        lease.stream.synchronize()
    if leases:
        streams.reclaim(leases[-1])
    return torch.cat(outs, dim=2)
