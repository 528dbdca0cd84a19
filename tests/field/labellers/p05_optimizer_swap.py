"""Optimizer state swapping through a fixed set of swap buffers."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

import torch


class SwapBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self.all_buffers = [torch.empty(numel) for _ in range(count)]
        self.free_index: List[int] = list(range(count))
        self.used_index: Dict[int, int] = {}

    def allocate(self, numel: int) -> Optional[torch.Tensor]:
        if numel > self.numel or not self.free_index:
            return None
        idx = self.free_index.pop()  # clean: pool body, recorded in used_index and returned
        buf = self.all_buffers[idx]
        self.used_index[id(buf)] = idx
        return buf

    def allocate_many(self, count: int) -> List[torch.Tensor]:
        got: List[torch.Tensor] = []
        for _ in range(count):
            buf = self.allocate(self.numel)  # clean: near miss, a partial set is freed before the empty list is returned
            if buf is None:
                for b in got:
                    self.free(b)
                return []
            got.append(buf)
        return got

    def free(self, buf: torch.Tensor) -> None:
        idx = self.used_index[id(buf)]
        del self.used_index[id(buf)]
        self.free_index.append(idx)


@dataclass
class ParamGroup:
    gid: int
    numel: int
    dirty: bool = False
    states: List[torch.Tensor] = field(default_factory=list)


class OptimizerSwapper:
    def __init__(self, pool: SwapBufferPool, disk: Dict[int, torch.Tensor], offload: bool) -> None:
        self.pool = pool
        self.disk = disk
        self.offload = offload
        self.trace_on = True
        self.trace_buffer: Optional[torch.Tensor] = None
        self.clip_on = True
        self.clip_buffer: Optional[torch.Tensor] = None

    def _read(self, g: ParamGroup, buf: torch.Tensor) -> None:
        buf[: g.numel].copy_(self.disk[g.gid])

    def pipelined_step(self, groups: List[ParamGroup], update: Callable[[torch.Tensor], None]) -> None:
        cur: Optional[torch.Tensor] = None
        for g in groups:
            nxt = self.pool.allocate(g.numel)  # clean: near miss, the rotated buffer is freed in the next round or after the loop
            if nxt is None:
                break
            self._read(g, nxt)
            if cur is not None:
                update(cur)
                self.pool.free(cur)
            cur = nxt
        if cur is not None:
            update(cur)
            self.pool.free(cur)

    def pipelined_norm(self, groups: List[ParamGroup]) -> float:
        total, prev = 0.0, None
        for g in groups:
            buf = self.pool.allocate(g.numel)  # leak: the buffer of the last group stays in prev at the end
            if buf is None:
                continue
            self._read(g, buf)
            total += float(buf[: g.numel].norm()) ** 2
            if prev is not None:
                self.pool.free(prev)
            prev = buf
        return total ** 0.5

    def swap_in(self, g: ParamGroup) -> bool:
        if g.states:
            return True
        bufs = self.pool.allocate_many(3)  # clean: kept in the group, freed by swap_out
        if not bufs:
            return False
        g.states = bufs
        self._read(g, g.states[0])
        return True

    def swap_out(self, g: ParamGroup) -> None:
        for buf in g.states:
            self.pool.free(buf)
        g.states = []
        g.dirty = False

    def reduce(self, g: ParamGroup, grad: torch.Tensor) -> None:
        use_pool = self.offload and grad.numel() <= self.pool.numel
        tmp = grad
        if use_pool:
            tmp = self.pool.allocate(grad.numel())  # clean: near miss, use_pool is cleared only when nothing was allocated
            if tmp is None:
                use_pool, tmp = False, torch.empty_like(grad)
            tmp[: grad.numel()].copy_(grad)
        self.disk[g.gid] = tmp[: grad.numel()].clone()
        if use_pool:
            self.pool.free(tmp)

    def accumulate(self, g: ParamGroup, grad: torch.Tensor) -> None:
        tmp: Optional[torch.Tensor] = None
        if self.offload:
            tmp = self.pool.allocate(grad.numel())  # leak: freed under offload and dirty, but taken under offload alone
        if tmp is None:
            self.disk[g.gid] += grad
            return
        tmp[: grad.numel()].copy_(grad)
        self.disk[g.gid] += tmp[: grad.numel()]
        if self.offload and g.dirty:
            self.pool.free(tmp)

    def start_trace(self) -> None:
        if self.trace_on and self.trace_buffer is None:
            self.trace_buffer = self.pool.allocate(self.pool.numel)  # leak: after set_trace(False) stop_trace never frees it

    def set_trace(self, on: bool) -> None:
        self.trace_on = on

    def stop_trace(self) -> None:
        if self.trace_on and self.trace_buffer is not None:
            self.pool.free(self.trace_buffer)
            self.trace_buffer = None

    def start_clip(self) -> None:
        if self.clip_on and self.clip_buffer is None:
            self.clip_buffer = self.pool.allocate(self.pool.numel)  # clean: near miss, set_clip stops before it turns the switch off

    def set_clip(self, on: bool) -> None:
        if not on:
            self.stop_clip()
        self.clip_on = on

    def stop_clip(self) -> None:
        if self.clip_on and self.clip_buffer is not None:
            self.pool.free(self.clip_buffer)
            self.clip_buffer = None
