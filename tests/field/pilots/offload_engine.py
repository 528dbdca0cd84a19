from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor


class PinnedPool:
    def __init__(self, block_bytes: int, num_blocks: int):
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._free = deque(torch.empty(block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_blocks))

    def checkout(self) -> Optional[Tensor]:
        with self._lock:
            return self._free.popleft() if self._free else None

    def checkin(self, block: Tensor) -> None:
        with self._lock:
            self._free.append(block)


class StreamPool:
    def __init__(self, n: int):
        self._free = [torch.cuda.Stream() for _ in range(n)]

    def borrow(self) -> torch.cuda.Stream:
        if self._free:
            return self._free.pop()
        return torch.cuda.Stream()

    def give_back(self, stream: torch.cuda.Stream) -> None:
        self._free.append(stream)


@dataclass
class Transfer:
    block: Tensor
    stream: torch.cuda.Stream
    event: torch.cuda.Event
    shape: torch.Size
    dtype: torch.dtype


class OffloadEngine:
    def __init__(self, pinned: PinnedPool, streams: StreamPool, max_resident: int):
        self.pinned = pinned
        self.streams = streams
        self.max_resident = max_resident
        self._host: OrderedDict[str, Transfer] = OrderedDict()
        self._meta_block: Optional[Tensor] = None
        self._main: Optional[torch.cuda.Stream] = None

    def open(self) -> bool:
        self._main = self.streams.borrow()  # clean: near miss, the failing meta block sends it back and close() does otherwise
        self._meta_block = self.pinned.checkout()  # leak: close() sets the field to None and never checks it in
        if self._meta_block is None:
            self.streams.give_back(self._main)
            self._main = None
            return False
        return True

    def _as(self, block: Tensor, t: Tensor) -> Tensor:
        return block[: t.nbytes].view(t.dtype).view(t.shape)

    def offload(self, name: str, t: Tensor) -> bool:
        if name in self._host:
            return True
        block = self.pinned.checkout()  # clean: near miss, too large a tensor checks it in and the rest goes into _host
        if block is None:
            return False
        if t.nbytes > self.pinned.block_bytes:
            self.pinned.checkin(block)
            return False
        stream = self.streams.borrow()  # clean: travels in the Transfer, _retire gives it back
        with torch.cuda.stream(stream):
            self._as(block, t).copy_(t, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        self._host[name] = Transfer(block, stream, event, t.shape, t.dtype)
        return True

    def _retire(self, tr: Transfer) -> None:
        tr.event.synchronize()
        self.pinned.checkin(tr.block)
        self.streams.give_back(tr.stream)

    def fetch(self, name: str, device: torch.device) -> Optional[Tensor]:
        tr = self._host.pop(name, None)
        if tr is None:
            return None
        n = tr.shape.numel() * tr.dtype.itemsize
        tr.event.synchronize()
        out = tr.block[:n].view(tr.dtype).view(tr.shape).to(device)
        self._retire(tr)
        return out

    def offload_pair(self, name: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> bool:
        first = self.pinned.checkout()  # leak: no second block means return False with the first still out
        if first is None:
            return False
        second = self.pinned.checkout()  # clean: near miss, nothing is held when it is None and both enter _host otherwise
        if second is None:
            return False
        for suffix, block, t in (("m", first, exp_avg), ("v", second, exp_avg_sq)):
            stream = self.streams.borrow()  # clean: near miss, each turn puts its own stream into a Transfer
            with torch.cuda.stream(stream):
                self._as(block, t).copy_(t, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
            key = f"{name}.{suffix}"
            if key in self._host:
                self._retire(self._host.pop(key))
            self._host[key] = Transfer(block, stream, event, t.shape, t.dtype)
        return True

    def shrink(self) -> int:
        n = 0
        while len(self._host) > self.max_resident:
            _, tr = self._host.popitem(last=False)
            self._retire(tr)
            n += 1
        return n

    def close(self) -> None:
        for tr in self._host.values():
            self._retire(tr)
        self._host.clear()
        if self._main is not None:
            self.streams.give_back(self._main)
            self._main = None
        self._meta_block = None


class CpuAdam:
    def __init__(self, engine: OffloadEngine, lr: float):
        self.engine = engine
        self.lr = lr

    def step(self, params: dict[str, Tensor]) -> int:
        done = 0
        for name, p in params.items():
            if p.grad is None:
                continue
            staging = self.engine.pinned.checkout()  # leak: sparse gradients continue without checkin
            if staging is None:
                break
            if p.grad.is_sparse:
                p.data.add_(p.grad.to_dense(), alpha=-self.lr)
                continue
            host = self.engine._as(staging, p.grad)
            host.copy_(p.grad)
            p.data.add_(host.to(p.device), alpha=-self.lr)
            self.engine.pinned.checkin(staging)
            done += 1
        return done

    def step_overlapped(self, params: list[Tensor]) -> None:
        pending: deque[tuple[Tensor, Tensor, Tensor]] = deque()
        stream = self.engine.streams.borrow()  # leak: the empty parameter list returns with the stream out
        if not params:
            return
        for p in params:
            block = self.engine.pinned.checkout()  # clean: near miss, pending is drained in the loop when full and after it to the end
            while block is None and pending:
                q, host, old = pending.popleft()
                q.data.add_(host.to(q.device), alpha=-self.lr)
                self.engine.pinned.checkin(old)
                block = self.engine.pinned.checkout()  # clean: near miss, the loop goes on only when it is None
            if block is None:
                p.data.add_(p.grad, alpha=-self.lr)
                continue
            host = self.engine._as(block, p.grad)
            with torch.cuda.stream(stream):
                host.copy_(p.grad, non_blocking=True)
            pending.append((p, host, block))
        stream.synchronize()
        while pending:
            p, host, block = pending.popleft()
            p.data.add_(host.to(p.device), alpha=-self.lr)
            self.engine.pinned.checkin(block)
        self.engine.streams.give_back(stream)
