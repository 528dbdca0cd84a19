from __future__ import annotations

import logging
import os
from typing import Iterator, Optional, Sequence

import torch

logger = logging.getLogger(__name__)

STATE_KEYS = ("exp_avg", "exp_avg_sq")


class SwapBufferManager:
    def __init__(self, num_elems: int, count: int, dtype: torch.dtype) -> None:
        self.num_elems = num_elems
        self.count = count
        self.dtype = dtype
        self.all_buffers = [torch.zeros(num_elems, dtype=dtype).pin_memory() for _ in range(count)]
        self.free_index = list(range(count))
        self.used_index: dict[int, int] = {}

    def allocate(self, num_elems: int, count: int) -> Optional[list[torch.Tensor]]:
        if num_elems > self.num_elems or count > len(self.free_index):
            return None
        buffers = []
        for _ in range(count):
            idx = self.free_index.pop()
            buf = self.all_buffers[idx]
            self.used_index[buf.data_ptr()] = idx
            buffers.append(buf)
        return buffers

    def allocate_all(self, num_elems: int) -> Optional[list[torch.Tensor]]:
        return self.allocate(num_elems, len(self.free_index))  # clean: handed to the caller

    def free(self, buffers: Sequence[torch.Tensor]) -> None:
        for buf in buffers:
            self.free_index.append(self.used_index.pop(buf.data_ptr()))


class SwapFile:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.swp")

    def read(self, name: str, dest: torch.Tensor) -> int:
        data = torch.load(self.path(name))
        dest[: data.numel()].copy_(data)
        return data.numel()

    def write(self, name: str, src: torch.Tensor) -> None:
        torch.save(src.clone(), self.path(name))


class PartitionedParamSwapper:
    def __init__(self, manager: SwapBufferManager, store: SwapFile) -> None:
        self.manager = manager
        self.store = store
        self.resident: dict[int, torch.Tensor] = {}
        self.numels: dict[int, int] = {}

    def register(self, param_id: int, numel: int) -> None:
        self.numels[param_id] = numel

    def swap_in(self, param_ids: Sequence[int]) -> bool:
        wanted = [p for p in param_ids if p not in self.resident]
        if not wanted:
            return True
        buffers = self.manager.allocate(self.manager.num_elems, len(wanted))  # clean: near miss, resident ids are filtered out, swap_out frees
        if buffers is None:
            return False
        for param_id, buf in zip(wanted, buffers):
            self.store.read(f"param_{param_id}", buf)
            self.resident[param_id] = buf
        return True

    def swap_out(self, param_ids: Sequence[int], dirty: bool) -> None:
        for param_id in param_ids:
            buf = self.resident.pop(param_id, None)
            if buf is None:
                continue
            if dirty:
                self.store.write(f"param_{param_id}", buf[: self.numels[param_id]])
            self.manager.free([buf])

    def refresh(self, param_id: int) -> torch.Tensor:
        got = self.manager.allocate(self.numels[param_id], 1)  # leak: the buffer resident for this id before is overwritten and never freed
        if got is None:
            raise RuntimeError(f"no swap buffer for param {param_id}")
        self.store.read(f"param_{param_id}", got[0])
        self.resident[param_id] = got[0]
        return got[0][: self.numels[param_id]]

    def replace(self, param_id: int, value: torch.Tensor) -> bool:
        got = self.manager.allocate(value.numel(), 1)  # clean: near miss, the older buffer is freed before it is overwritten
        if got is None:
            return False
        got[0][: value.numel()].copy_(value)
        old = self.resident.get(param_id)
        if old is not None:
            self.manager.free([old])
        self.resident[param_id] = got[0]
        self.numels[param_id] = value.numel()
        return True

    def read_with_retry(self, param_id: int, attempts: int = 3) -> Optional[torch.Tensor]:
        for attempt in range(attempts):
            got = self.manager.allocate(self.numels[param_id], 1)  # leak: a failed read goes round the loop with the buffer still taken
            if got is None:
                return None
            try:
                numel = self.store.read(f"param_{param_id}", got[0])
            except OSError:
                logger.warning("read of param %d failed, attempt %d", param_id, attempt)
                continue
            out = got[0][:numel].clone()
            self.manager.free(got)
            return out
        return None


class OptimizerStateSwapper:
    def __init__(self, manager: SwapBufferManager, store: SwapFile, lr: float) -> None:
        self.manager = manager
        self.store = store
        self.lr = lr
        self.reserve: Optional[list[torch.Tensor]] = None

    def hold_reserve(self) -> None:
        if self.reserve is None:
            self.reserve = self.manager.allocate_all(self.manager.num_elems)  # clean: near miss, kept on purpose, close() frees it

    def close(self) -> None:
        if self.reserve is not None:
            self.manager.free(self.reserve)
            self.reserve = None

    def initialize(self, name: str, numel: int) -> None:
        aligned = len(STATE_KEYS) + 1
        buffers = self.manager.allocate(numel, aligned)  # leak: only the buffers of STATE_KEYS are freed, the third stays taken
        if buffers is None:
            raise RuntimeError("swap buffers too small")
        for key, buf in zip(STATE_KEYS, buffers):
            buf.zero_()
            self.store.write(f"{name}_{key}", buf[:numel])
        self.store.write(f"{name}_master", buffers[-1][:numel])
        self.manager.free(buffers[: len(STATE_KEYS)])

    def step(self, name: str, grad: torch.Tensor) -> bool:
        states = self.manager.allocate(grad.numel(), len(STATE_KEYS))  # clean: near miss, freed on both ways through finally
        if states is None:
            return False
        try:
            for key, buf in zip(STATE_KEYS, states):
                try:
                    self.store.read(f"{name}_{key}", buf)
                except FileNotFoundError:
                    return False
            exp_avg, exp_avg_sq = (s[: grad.numel()] for s in states)
            exp_avg.mul_(0.9).add_(grad, alpha=0.1)
            exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
            for key, buf in zip(STATE_KEYS, states):
                self.store.write(f"{name}_{key}", buf[: grad.numel()])
        finally:
            self.manager.free(states)
        return True

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            got = self.manager.allocate(self.manager.num_elems, 1)  # clean: near miss, finally runs on generator close as well
            if got is None:
                return
            try:
                numel = self.store.read(f"{name}_{STATE_KEYS[0]}", got[0])
                yield name, got[0][:numel]
            finally:
                self.manager.free(got)

    def pipelined_norms(self, names: Sequence[str], limit: float) -> dict[str, float]:
        norms: dict[str, float] = {}
        ahead = self.manager.allocate(self.manager.num_elems, 1)  # clean: near miss, None ends it, else becomes current and is freed below
        if ahead is None or not names:
            if ahead is not None:
                self.manager.free(ahead)
            return norms
        for i, name in enumerate(names):
            current = ahead
            ahead = None
            if i + 1 < len(names):
                ahead = self.manager.allocate(self.manager.num_elems, 1)  # leak: the break at the limit leaves the buffer taken for the next name
            if current is None:
                break
            numel = self.store.read(name, current[0])
            norms[name] = float(current[0][:numel].norm())
            self.manager.free(current)
            if norms[name] > limit:
                logger.error("state %s is above the limit", name)
                break
        return norms


def export_states(swapper: OptimizerStateSwapper, names: Sequence[str]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, view in swapper.stream(names):
        out[name] = view.clone()
    return out


def preload(swapper: PartitionedParamSwapper, order: Sequence[int]) -> int:
    loaded = 0
    for param_id in order:
        if not swapper.swap_in([param_id]):
            break
        loaded += 1
    return loaded
