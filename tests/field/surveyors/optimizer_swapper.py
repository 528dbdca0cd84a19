"""Swapping of optimizer state between pinned host buffers and NVMe files."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional, Protocol

import torch

logger = logging.getLogger(__name__)


class AioHandle(Protocol):
    def read_all(self, buffers: list[torch.Tensor], paths: list[str]) -> int: ...

    def write_all(self, buffers: list[torch.Tensor], paths: list[str]) -> int: ...


@dataclass
class SwapParam:
    param_id: int
    numel: int
    paths: list[str] = field(default_factory=list)
    fp32: Optional[torch.Tensor] = None


class SwapBufferManager:
    def __init__(self, num_elems: int, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.num_elems = num_elems
        self.all_buffers = [torch.zeros(num_elems, dtype=dtype, pin_memory=True) for _ in range(count)]
        self.free_buffer_index = list(range(count))
        self.used_buffer_index: dict[int, int] = {}

    def allocate(self, num_elems: int, count: int) -> Optional[list[torch.Tensor]]:
        if num_elems > self.num_elems:
            raise ValueError(f"{num_elems} elements do not fit a buffer of {self.num_elems}")
        if count > len(self.free_buffer_index):
            return None
        buffers = []
        for _ in range(count):
            index = self.free_buffer_index.pop()
            buf = self.all_buffers[index]
            self.used_buffer_index[id(buf)] = index
            buffers.append(buf)
        return buffers

    def free(self, buffers: list[torch.Tensor]) -> None:
        for buf in buffers:
            self.free_buffer_index.append(self.used_buffer_index.pop(id(buf)))


class OptimizerStateSwapper:
    def __init__(self, manager: SwapBufferManager, aio: AioHandle) -> None:
        self.manager = manager
        self.aio = aio
        self.swapped_in: dict[int, list[torch.Tensor]] = {}
        self.grad_buffers: Optional[list[torch.Tensor]] = None
        self.norm_buffers: Optional[list[torch.Tensor]] = None

    def swap_in(self, param: SwapParam) -> bool:
        if param.param_id in self.swapped_in:
            return True
        buffers = self.manager.allocate(param.numel, len(param.paths))  # clean: near miss, freed on a short read, else kept in swapped_in until swap_out or close
        if buffers is None:
            return False
        if self.aio.read_all(buffers, param.paths) != len(param.paths):
            self.manager.free(buffers)
            return False
        self.swapped_in[param.param_id] = buffers
        return True

    def swap_out(self, param: SwapParam, dirty: bool) -> None:
        buffers = self.swapped_in.pop(param.param_id, None)
        if buffers is None:
            return
        if dirty:
            self.aio.write_all(buffers, param.paths)
        self.manager.free(buffers)

    def initialize_from_fp32(self, params: Iterable[SwapParam]) -> int:
        written = 0
        for param in params:
            buffers = self.manager.allocate(param.numel, len(param.paths))  # leak: the continue for parameters without fp32 skips free
            if buffers is None:
                break
            if param.fp32 is None:
                logger.debug("param %d has no fp32 partition on this rank", param.param_id)
                continue
            for buf in buffers:
                buf[: param.numel].copy_(param.fp32.view(-1))
            self.aio.write_all(buffers, param.paths)
            self.manager.free(buffers)
            written += 1
        return written

    def swap_out_gradients(self, param: SwapParam, grads: list[torch.Tensor], paths: list[str]) -> bool:
        buffers = self.manager.allocate(param.numel, len(grads))  # leak: a short write returns False without free
        if buffers is None:
            return False
        for buf, grad in zip(buffers, grads):
            buf[: grad.numel()].copy_(grad.view(-1))
        if self.aio.write_all(buffers, paths) != len(grads):
            logger.warning("short write of gradients of param %d", param.param_id)
            return False
        self.manager.free(buffers)
        return True

    def ensure_grad_buffers(self, numel: int) -> Optional[list[torch.Tensor]]:
        if self.grad_buffers is None:
            self.grad_buffers = self.manager.allocate(numel, 2)  # clean: near miss, only taken while the field is empty and freed in close
        return self.grad_buffers

    def ensure_norm_buffers(self, numel: int) -> Optional[list[torch.Tensor]]:
        if self.norm_buffers is None:
            self.norm_buffers = self.manager.allocate(numel, 1)  # leak: close forgets norm_buffers
        return self.norm_buffers

    def pipelined_step(self, params: Iterable[SwapParam], step_fn: Callable[[SwapParam, list[torch.Tensor]], None]) -> None:
        current: Optional[list[torch.Tensor]] = None
        for param in params:
            upcoming = self.manager.allocate(param.numel, len(param.paths))  # clean: near miss, becomes current and is freed by the next turn or after the loop
            if upcoming is None:
                break
            self.aio.read_all(upcoming, param.paths)
            if current is not None:
                self.manager.free(current)
            step_fn(param, upcoming)
            current = upcoming
        if current is not None:
            self.manager.free(current)

    def state_norm(self, param: SwapParam) -> Optional[float]:
        buffers = self.manager.allocate(param.numel, len(param.paths))  # leak: an OSError is answered with None and the buffers stay out
        if buffers is None:
            return None
        try:
            self.aio.read_all(buffers, param.paths)
        except OSError as exc:
            logger.warning("cannot read state of param %d: %s", param.param_id, exc)
            return None
        total = sum(float(buf[: param.numel].norm()) for buf in buffers)
        self.manager.free(buffers)
        return total

    def has_nan(self, param: SwapParam) -> Optional[bool]:
        buffers = self.manager.allocate(param.numel, len(param.paths))  # clean: near miss, finally frees also on the handled OSError
        if buffers is None:
            return None
        try:
            self.aio.read_all(buffers, param.paths)
            return any(bool(torch.isnan(buf[: param.numel]).any()) for buf in buffers)
        except OSError:
            return None
        finally:
            self.manager.free(buffers)

    def repartition(self, param: SwapParam, numel: int, new_paths: list[str]) -> bool:
        source = self.manager.allocate(param.numel, len(param.paths))  # clean: near miss, freed when the second allocation fails and at the end
        if source is None:
            return False
        target = self.manager.allocate(numel, len(new_paths))  # clean: freed at the end
        if target is None:
            self.manager.free(source)
            return False
        self.aio.read_all(source, param.paths)
        for src, dst in zip(source, target):
            dst[:numel].copy_(src[:numel])
        self.aio.write_all(target, new_paths)
        self.manager.free(source)
        self.manager.free(target)
        param.numel, param.paths = numel, new_paths
        return True

    def close(self) -> None:
        for buffers in self.swapped_in.values():
            self.manager.free(buffers)
        self.swapped_in.clear()
        if self.grad_buffers is not None:
            self.manager.free(self.grad_buffers)
            self.grad_buffers = None
