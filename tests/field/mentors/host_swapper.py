"""Swaps optimizer state between pinned host buffers and files (ZeRO-Infinity style)."""
from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Iterator

import torch


@dataclass(eq=False)
class PinnedBuffer:
    index: int
    data: torch.Tensor


class PinnedPool:
    def __init__(self, count: int, numel: int, dtype: torch.dtype = torch.float32) -> None:
        pin = torch.cuda.is_available()
        self.numel = numel
        self._all = [PinnedBuffer(i, torch.empty(numel, dtype=dtype, pin_memory=pin)) for i in range(count)]
        self._idle = list(self._all)

    def take(self, numel: int) -> PinnedBuffer | None:
        if numel > self.numel or not self._idle:
            return None
        return self._idle.pop()

    def take_pair(self, numel: int) -> tuple[PinnedBuffer, PinnedBuffer] | None:
        first = self.take(numel)  # leak: lost when there is no second buffer
        second = self.take(numel)  # clean: returned with the first, or None
        if first is None or second is None:
            return None
        return first, second

    def give_back(self, buf: PinnedBuffer) -> None:
        self._idle.append(buf)

    def available(self) -> int:
        return len(self._idle)


class OptimizerSwapper:
    def __init__(self, pool: PinnedPool, folder: str, threads: int = 4) -> None:
        self.pool = pool
        self.folder = folder
        self.executor = ThreadPoolExecutor(threads)
        self.resident: dict[int, PinnedBuffer] = {}
        self.pending: dict[int, tuple[Future[int], PinnedBuffer]] = {}
        self.prefetched: dict[int, tuple[Future[int], PinnedBuffer]] = {}
        self.grad_stage: PinnedBuffer | None = None

    def _path(self, param_id: int) -> str:
        return os.path.join(self.folder, f"{param_id}.state")

    def _read(self, param_id: int, dst: torch.Tensor) -> int:
        try:
            with open(self._path(param_id), "rb") as f:
                raw = bytearray(f.read())
        except FileNotFoundError:
            return 0
        src = torch.frombuffer(raw, dtype=dst.dtype)
        dst[: src.numel()].copy_(src)
        return src.numel()

    def _write(self, param_id: int, src: torch.Tensor) -> int:
        with open(self._path(param_id), "wb") as f:
            return f.write(src.numpy().tobytes())

    def swap_in(self, param_id: int, numel: int) -> torch.Tensor | None:
        if param_id in self.resident:
            return self.resident[param_id].data[:numel]
        if param_id in self.pending:
            writing, buf = self.pending.pop(param_id)
            wait([writing])
        elif param_id in self.prefetched:
            fut, buf = self.prefetched.pop(param_id)
            fut.result()
        else:
            taken = self.pool.take(numel)  # leak: dropped when the file is absent
            if taken is None:
                return None
            buf = taken
            if self._read(param_id, buf.data[:numel]) == 0:
                return None
        self.resident[param_id] = buf
        return buf.data[:numel]

    def load_cloned(self, param_id: int, numel: int) -> torch.Tensor | None:
        buf = self.pool.take(numel)  # clean: near miss, given back in finally on either return
        if buf is None:
            return None
        try:
            if not self._read(param_id, buf.data[:numel]):
                return None
            return buf.data[:numel].clone()
        finally:
            self.pool.give_back(buf)

    def swap_out_async(self, param_id: int) -> None:
        buf = self.resident.pop(param_id)
        self.pending[param_id] = (self.executor.submit(self._write, param_id, buf.data), buf)

    def prefetch(self, param_ids: list[int], numel: int) -> int:
        started = 0
        for pid in param_ids:
            if pid in self.resident or pid in self.pending or pid in self.prefetched:
                continue
            buf = self.pool.take(numel)  # clean: kept in prefetched with its future
            if buf is None:
                break
            self.prefetched[pid] = (self.executor.submit(self._read, pid, buf.data[:numel]), buf)
            started += 1
        return started

    def prefetch_group(self, group: list[int], numel: int) -> bool:
        held: list[tuple[int, PinnedBuffer]] = []
        for pid in group:
            buf = self.pool.take(numel)  # leak: overwrites the entry of a parameter that is prefetched already
            if buf is None:
                for _, earlier in held:
                    self.pool.give_back(earlier)
                return False
            held.append((pid, buf))
        for pid, buf in held:
            self.prefetched[pid] = (self.executor.submit(self._read, pid, buf.data[:numel]), buf)
        return True

    def drain(self) -> int:
        written = 0
        for pid in list(self.pending):
            fut, buf = self.pending.pop(pid)
            try:
                written += fut.result()
            except OSError:
                self.resident[pid] = buf
                continue
            self.pool.give_back(buf)
        return written

    def stage_grad(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self.grad_stage is None:
            self.grad_stage = self.pool.take(grad.numel())  # clean: one for the life of the swapper, given back in close
        if self.grad_stage is None:
            return None
        view = self.grad_stage.data[: grad.numel()]
        view.copy_(grad.flatten())
        return view

    def average_states(self, a: int, b: int, numel: int) -> torch.Tensor | None:
        pair = self.pool.take_pair(numel)  # clean: both given back below
        if pair is None:
            return None
        left, right = pair
        n = min(self._read(a, left.data[:numel]), self._read(b, right.data[:numel]))
        out = (left.data[:n] + right.data[:n]) / 2 if n else None
        self.pool.give_back(left)
        self.pool.give_back(right)
        return out

    def iter_states(self, param_ids: list[int], numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        for pid in param_ids:
            buf = self.pool.take(numel)  # leak: the `continue` for an absent file skips the give_back
            if buf is None:
                raise RuntimeError("pinned pool is exhausted")
            if not self._read(pid, buf.data[:numel]):
                continue
            try:
                yield pid, buf.data[:numel]
            finally:
                self.pool.give_back(buf)

    def close(self) -> None:
        self.drain()
        for buf in self.resident.values():
            self.pool.give_back(buf)
        self.resident.clear()
        for fut, buf in self.prefetched.values():
            fut.result()
            self.pool.give_back(buf)
        self.prefetched.clear()
        if self.grad_stage is not None:
            self.pool.give_back(self.grad_stage)
            self.grad_stage = None
        self.executor.shutdown()
