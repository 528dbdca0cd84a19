import logging
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class SwapBufferManager(object):
    """Equal sized pinned buffers, lent by index."""

    def __init__(self, num_elems, count, dtype):
        self.num_elems = num_elems
        self.count = count
        self.dtype = dtype
        self.all_buffers = [torch.zeros(num_elems, dtype=dtype) for _ in range(count)]
        self.free_buffer_index = [i for i in range(count)]
        self.used_buffer_index = {}

    def allocate(self, num_elems, count, dtype):
        assert dtype == self.dtype
        assert num_elems <= self.num_elems
        if count > len(self.free_buffer_index):
            return None
        used = self.free_buffer_index[-count:]
        self.free_buffer_index = self.free_buffer_index[:-count]
        bufs = []
        for i in used:
            t = self.all_buffers[i].narrow(0, 0, num_elems)
            bufs.append(t)
            self.used_buffer_index[id(t)] = i
        return bufs

    def allocate_all(self, num_elems, dtype):
        return self.allocate(num_elems, len(self.free_buffer_index), dtype)  # clean: wrapper, result goes to the caller

    def free(self, buffers):
        for b in buffers:
            self.free_buffer_index.append(self.used_buffer_index.pop(id(b)))


class SwapperBase:
    def __init__(self, manager: SwapBufferManager) -> None:
        self.manager = manager
        self.swap_in_buffers: Optional[List[torch.Tensor]] = None
        self.swap_out_buffers: Optional[List[torch.Tensor]] = None
        self.grad_buffers: List[torch.Tensor] = []

    def _read(self, path: str, bufs: List[torch.Tensor]) -> int:
        return len(bufs)

    def _write(self, path: str, bufs: List[torch.Tensor]) -> int:
        return len(bufs)

    def release_swap_in(self) -> None:
        if self.swap_in_buffers:
            self.manager.free(self.swap_in_buffers)
        self.swap_in_buffers = None


class ParamSwapper(SwapperBase):
    def swap_in(self, path: str, numel: int) -> bool:
        assert self.swap_in_buffers is None
        self.swap_in_buffers = self.manager.allocate(numel, 1, torch.float32)  # clean: release_swap_in of the base frees it
        if self.swap_in_buffers is None:
            return False
        self._read(path, self.swap_in_buffers)
        return True

    def swap_out(self, path: str, param: torch.Tensor) -> None:
        bufs = self.manager.allocate(param.numel(), 1, param.dtype)  # clean: freed after the write
        if bufs is None:
            self.release_swap_in()
            bufs = self.manager.allocate(param.numel(), 1, param.dtype)  # clean: second attempt after the first failed, freed below
            assert bufs is not None
        bufs[0].copy_(param.flatten())
        self._write(path, bufs)
        self.manager.free(bufs)

    def swap_out_async(self, path: str, param: torch.Tensor) -> None:
        bufs = self.manager.allocate(param.numel(), 1, param.dtype)  # leak: wait_out() sets the field to None without freeing
        self.swap_out_buffers = bufs
        if bufs is not None:
            bufs[0].copy_(param.flatten())

    def wait_out(self, path: str) -> int:
        if self.swap_out_buffers is None:
            return 0
        n = self._write(path, self.swap_out_buffers)
        self.swap_out_buffers = None
        return n


class OptimizerSwapper(ParamSwapper):
    STATES = ("exp_avg", "exp_avg_sq")

    def load_states(self, path: str, p: torch.nn.Parameter, opt: Optimizer) -> bool:
        bufs = self.manager.allocate(p.numel(), len(self.STATES), torch.float32)  # leak: an incomplete read returns False and the buffers stay out
        if bufs is None:
            return False
        if self._read(path, bufs) != len(self.STATES):
            logger.error("incomplete optimizer state in %s", path)
            return False
        for name, b in zip(self.STATES, bufs):
            opt.state[p][name] = b.clone().view_as(p)
        self.manager.free(bufs)
        return True

    def store_states(self, path: str, p: torch.nn.Parameter, opt: Optimizer) -> bool:
        bufs = self.manager.allocate(p.numel(), len(self.STATES), torch.float32)  # clean: near miss, the missing state jumps to the free too
        if bufs is None:
            return False
        written = 0
        for name, b in zip(self.STATES, bufs):
            if name not in opt.state[p]:
                break
            b.copy_(opt.state[p][name].flatten())
            written += 1
        if written == len(self.STATES):
            self._write(path, bufs)
        self.manager.free(bufs)
        return written == len(self.STATES)

    def stage_grads(self, grads: List[torch.Tensor]) -> int:
        staged = 0
        for g in grads:
            got = self.manager.allocate(g.numel(), 1, torch.float32)  # clean: collected in grad_buffers, apply_grads frees
            if got is None:
                break
            got[0].copy_(g.flatten())
            self.grad_buffers.extend(got)
            staged += 1
        return staged

    def apply_grads(self, params: List[torch.Tensor], lr: float) -> None:
        for p, g in zip(params, self.grad_buffers):
            p.data.add_(g.view_as(p), alpha=-lr)
        self.manager.free(self.grad_buffers)
        self.grad_buffers = []

    def grad_scale(self, numel: int) -> Tuple[float, int]:
        bufs = self.manager.allocate_all(numel, torch.float32)  # leak: the slice gives back all but the first
        if bufs is None:
            return 0.0, 0
        norm = float(torch.stack([b.norm() for b in bufs]).norm()) if bufs else 0.0
        self.manager.free(bufs[1:])
        return norm, len(bufs)

    def zero_all(self, numel: int) -> None:
        bufs = self.manager.allocate_all(numel, torch.float32)  # clean: near miss, freed in two parts that make up the whole
        if bufs is None:
            return
        for b in bufs:
            b.zero_()
        self.manager.free(bufs[:1])
        self.manager.free(bufs[1:])
