"""Optimizer state swapping between the device and pinned host memory."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)


class PinnedPool:
    """Fixed number of pinned buffers; take() gives None when all are out."""

    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._free = deque(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count))
        self._lock = threading.Lock()

    def take(self) -> Optional[torch.Tensor]:
        with self._lock:
            return self._free.popleft() if self._free else None

    def put(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buf)


def _to_host(buf: torch.Tensor, src: torch.Tensor) -> None:
    raw = src.detach().reshape(-1).view(torch.uint8)
    buf[: raw.numel()].copy_(raw, non_blocking=True)


def _to_device(dst: torch.Tensor, buf: torch.Tensor) -> None:
    raw = dst.view(-1).view(torch.uint8)
    raw.copy_(buf[: raw.numel()], non_blocking=True)


class MomentSwapper:
    """Keeps exp_avg / exp_avg_sq of cold parameters on the host."""

    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.host: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}

    def swap_out(self, pid: int, state: dict) -> bool:
        if pid in self.host:
            return True
        first = self.pool.take()  # leak: second take gives None and the first is not put back
        if first is None:
            return False
        second = self.pool.take()  # clean: stored with the first, swap_in and close put it
        if second is None:
            log.debug("no room for %d", pid)
            return False
        _to_host(first, state["exp_avg"])
        _to_host(second, state["exp_avg_sq"])
        self.host[pid] = (first, second)
        return True

    def swap_in(self, pid: int, state: dict) -> bool:
        pair = self.host.pop(pid, None)
        if pair is None:
            return False
        for buf, name in zip(pair, ("exp_avg", "exp_avg_sq")):
            _to_device(state[name], buf)
            self.pool.put(buf)
        return True

    def close(self) -> None:
        while self.host:
            _, pair = self.host.popitem()
            for buf in pair:
                self.pool.put(buf)


class MasterStage:
    """One staging buffer for the fp32 master copy of the running step."""

    def __init__(self, pool: PinnedPool, scaler):
        self.pool = pool
        self.scaler = scaler
        self.stage: Optional[torch.Tensor] = None

    def begin_step(self, master: torch.Tensor) -> None:
        self.stage = self.pool.take()  # leak: end_step returns early on found_inf, the next begin_step overwrites
        if self.stage is not None:
            _to_host(self.stage, master)

    def end_step(self, master: torch.Tensor) -> bool:
        if self.scaler.found_inf():
            self.scaler.update()
            return False
        if self.stage is not None:
            _to_device(master, self.stage)
            self.pool.put(self.stage)
            self.stage = None
        return True


class HotStateCache:
    def __init__(self, pool: PinnedPool, limit: int):
        self.pool = pool
        self.limit = limit
        self.entries: "OrderedDict[int, torch.Tensor]" = OrderedDict()

    def hold(self, pid: int, src: torch.Tensor) -> Optional[torch.Tensor]:
        buf = self.entries.get(pid)
        if buf is None:
            while len(self.entries) >= self.limit:
                _, old = self.entries.popitem(last=False)
                self.pool.put(old)
            buf = self.pool.take()  # clean: near miss, only for an absent key and evictions put
            if buf is None:
                return None
            self.entries[pid] = buf
        self.entries.move_to_end(pid)
        _to_host(buf, src)
        return buf

    def close(self) -> None:
        for buf in self.entries.values():
            self.pool.put(buf)
        self.entries.clear()


class GroupPrefetcher:
    """Reads a parameter group ahead of the optimizer; ready groups wait in a table."""

    def __init__(self, pool: PinnedPool, reader):
        self.pool = pool
        self.reader = reader
        self.current: Optional[torch.Tensor] = None
        self.ready: Dict[int, torch.Tensor] = {}

    def start(self, group: int) -> bool:
        if self.current is not None or group in self.ready:
            return False
        self.current = self.pool.take()  # leak: moved by finish into ready, which cancel only clears
        if self.current is None:
            return False
        self.reader.submit(group, self.current)
        return True

    def finish(self, group: int) -> None:
        if self.current is not None:
            self.reader.wait(group)
            self.ready[group] = self.current
            self.current = None

    def consume(self, group: int, dst: torch.Tensor) -> None:
        buf = self.ready.pop(group)
        _to_device(dst, buf)
        self.pool.put(buf)

    def cancel(self) -> None:
        if self.current is not None:
            self.pool.put(self.current)
            self.current = None
        self.ready.clear()


class DoubleBuffer:
    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.front: Optional[torch.Tensor] = None
        self.back: Optional[torch.Tensor] = None

    def advance(self, src: torch.Tensor) -> None:
        retired, self.back = self.back, self.front
        if retired is not None:
            self.pool.put(retired)
        self.front = self.pool.take()  # clean: near miss, shifts to back and is put one advance later
        if self.front is not None:
            _to_host(self.front, src)

    def close(self) -> None:
        for buf in (self.front, self.back):
            if buf is not None:
                self.pool.put(buf)
        self.front = self.back = None


@dataclass
class Held:
    pid: int
    buf: torch.Tensor


class ShardKeeper:
    """Host copies of the local shard, reshaped when the parameter set changes."""

    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.held: List[Held] = []

    def keep(self, pid: int, src: torch.Tensor) -> None:
        buf = self.pool.take()  # leak: reshard filters it out of the list without put
        if buf is None:
            raise MemoryError("pinned pool exhausted")
        _to_host(buf, src)
        self.held.append(Held(pid, buf))

    def reshard(self, alive: Iterable[int]) -> None:
        keep = set(alive)
        self.held = [h for h in self.held if h.pid in keep]

    def close(self) -> None:
        while self.held:
            self.pool.put(self.held.pop().buf)


def flush_states(pool: PinnedPool, states: Dict[int, torch.Tensor], writer) -> int:
    """Writes each state through a bounce buffer; returns how many got through."""
    written = 0
    for pid, state in states.items():
        bounce = pool.take()  # leak: a write that raises OSError is survived and the bounce is skipped
        if bounce is None:
            break
        _to_host(bounce, state)
        try:
            writer.write(pid, bounce)
            pool.put(bounce)
            written += 1
        except OSError:
            log.warning("state %d not written", pid)
    return written


class LazyScratch:
    def __init__(self, pool: PinnedPool):
        self.pool = pool
        self.buf: Optional[torch.Tensor] = None

    def get(self) -> torch.Tensor:
        if self.buf is None:
            self.buf = self.pool.take()  # clean: near miss, guarded field, drop puts it
            if self.buf is None:
                raise MemoryError("pinned pool exhausted")
        return self.buf

    def drop(self) -> None:
        buf, self.buf = self.buf, None
        if buf is not None:
            self.pool.put(buf)
