"""ZeRO style optimizer state offload with swap buffers."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Set

import torch


@dataclass
class SwapBuffer:
    slot: int
    data: torch.Tensor
    param_id: Optional[int] = None


class SwapBufferManager:
    def __init__(self, count: int, numel: int) -> None:
        self._all = [SwapBuffer(i, torch.empty(numel)) for i in range(count)]
        self._free: List[int] = list(range(count))
        self._used: Set[int] = set()

    def allocate(self) -> Optional[SwapBuffer]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._used.add(slot)
        return self._all[slot]

    def allocate_many(self, count: int) -> Optional[List[SwapBuffer]]:
        out: List[SwapBuffer] = []
        for _ in range(count):
            buf = self.allocate()  # leak: a shortage returns None and forgets those in out
            if buf is None:
                return None
            out.append(buf)
        return out

    def allocate_up_to(self, count: int) -> List[SwapBuffer]:
        out: List[SwapBuffer] = []
        for _ in range(count):
            buf = self.allocate()  # clean: near miss, a shortage returns the shorter list to the caller
            if buf is None:
                return out
            out.append(buf)
        return out

    def free(self, buf: SwapBuffer) -> None:
        if buf.slot in self._used:
            self._used.remove(buf.slot)
            buf.param_id = None
            self._free.append(buf.slot)

    def free_many(self, bufs: List[SwapBuffer]) -> None:
        for buf in bufs:
            self.free(buf)


class OffloadedAdam:
    def __init__(self, manager: SwapBufferManager, folder: Path, lr: float = 1e-4) -> None:
        self.manager = manager
        self.folder = folder
        self.lr = lr
        self.resident: Dict[int, List[SwapBuffer]] = {}
        self.prefetched: Dict[int, SwapBuffer] = {}
        self.grad_bufs: Dict[int, SwapBuffer] = {}
        self.numel: Dict[int, int] = {}

    def _path(self, pid: int, name: str) -> Path:
        return self.folder / f"{pid}.{name}.pt"

    def _read(self, pid: int, name: str, buf: SwapBuffer) -> bool:
        path = self._path(pid, name)
        if not path.exists():
            return False
        src = torch.load(path)
        buf.data[:src.numel()].copy_(src.flatten())
        buf.param_id = pid
        return True

    def _write(self, pid: int, name: str, buf: SwapBuffer) -> None:
        torch.save(buf.data[:self.numel[pid]].clone(), self._path(pid, name))

    def swap_in(self, pid: int) -> bool:
        if pid in self.resident:
            return True
        bufs = self.manager.allocate_many(2)  # clean: near miss, freed when there is no state on disk, else resident
        if bufs is None:
            return False
        for name, buf in zip(("exp_avg", "exp_avg_sq"), bufs):
            if not self._read(pid, name, buf):
                self.manager.free_many(bufs)
                return False
        self.resident[pid] = bufs
        return True

    def swap_out(self, pid: int) -> None:
        bufs = self.resident.pop(pid, None)
        if bufs is None:
            return
        for name, buf in zip(("exp_avg", "exp_avg_sq"), bufs):
            self._write(pid, name, buf)
        self.manager.free_many(bufs)

    def init_state(self, pid: int, numel: int) -> bool:
        if pid in self.numel:
            return True
        first = self.manager.allocate()  # leak: kept out when the second buffer is not to be had
        if first is None:
            return False
        second = self.manager.allocate()  # clean: freed with first after the zeros are written
        if second is None:
            return False
        self.numel[pid] = numel
        for name, buf in (("exp_avg", first), ("exp_avg_sq", second)):
            buf.data.zero_()
            self._write(pid, name, buf)
        self.manager.free_many([first, second])
        return True

    def prefetch(self, pids: List[int]) -> int:
        hits = 0
        for pid in pids:
            if pid in self.prefetched:
                continue
            buf = self.manager.allocate()  # leak: the continue for an absent file leaves the buffer used
            if buf is None:
                break
            if not self._read(pid, "master", buf):
                continue
            self.prefetched[pid] = buf
            hits += 1
        return hits

    def take_master(self, pid: int) -> Optional[torch.Tensor]:
        buf = self.prefetched.pop(pid, None)
        if buf is None:
            buf = self.manager.allocate()  # clean: near miss, freed in both ways on, as a prefetched one is
            if buf is None:
                return None
            if not self._read(pid, "master", buf):
                self.manager.free(buf)
                return None
        out = buf.data[:self.numel[pid]].clone()
        self.manager.free(buf)
        return out

    def stash_grad(self, pid: int, grad: torch.Tensor) -> bool:
        if pid in self.grad_bufs:
            self.grad_bufs[pid].data[:grad.numel()].add_(grad.flatten())
            return True
        buf = self.manager.allocate()  # clean: near miss, only when the parameter has none, filed by parameter, step or zero_grad frees it
        if buf is None:
            return False
        buf.data[:grad.numel()].copy_(grad.flatten())
        self.grad_bufs[pid] = buf
        return True

    def overflowed(self) -> bool:
        return any(not torch.isfinite(b.data[:self.numel[p]]).all() for p, b in self.grad_bufs.items())

    def zero_grad(self) -> None:
        for buf in self.grad_bufs.values():
            self.manager.free(buf)
        self.grad_bufs.clear()

    def step(self, params: Dict[int, torch.Tensor]) -> bool:
        if self.overflowed():
            self.zero_grad()
            return False
        for pid, grad in self.grad_bufs.items():
            if not self.swap_in(pid):  # clean: swap_out follows in the same round
                continue
            n = self.numel[pid]
            avg, sq = (b.data[:n] for b in self.resident[pid])
            g = grad.data[:n]
            avg.mul_(0.9).add_(g, alpha=0.1)
            sq.mul_(0.999).addcmul_(g, g, value=0.001)
            params[pid].view(-1).addcdiv_(avg, sq.sqrt().add_(1e-8), value=-self.lr)
            self.swap_out(pid)
        self.zero_grad()
        return True

    def grad_norm(self, grads: Iterator[torch.Tensor]) -> float:
        work = self.manager.allocate()  # leak: a non-finite gradient returns inside the loop without free
        if work is None:
            return 0.0
        total = 0.0
        for g in grads:
            flat = work.data[:g.numel()].copy_(g.flatten())
            if not torch.isfinite(flat).all():
                return float("inf")
            total += float(flat.pow(2).sum())
        self.manager.free(work)
        return total ** 0.5

    def reduce_scratch(self, tensors: List[torch.Tensor]) -> List[torch.Tensor]:
        bufs = self.manager.allocate_up_to(len(tensors))  # leak: a shortage falls back to clones and drops those it got
        if len(bufs) < len(tensors):
            return [t.clone() for t in tensors]
        for buf, t in zip(bufs, tensors):
            buf.data[:t.numel()].copy_(t.flatten())
        out = [b.data[:t.numel()].clone() for b, t in zip(bufs, tensors)]
        self.manager.free_many(bufs)
        return out

    def close(self) -> None:
        for pid in list(self.resident):
            self.swap_out(pid)
        for buf in self.prefetched.values():
            self.manager.free(buf)
        self.prefetched.clear()
        self.zero_grad()
