"""Swap manager: moves blocks of preempted requests between the GPU and the CPU pool."""
from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)


class Device(enum.Enum):
    GPU = "gpu"
    CPU = "cpu"


class NoFreeBlocks(ValueError):
    pass


class DevicePool:
    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks))

    def allocate(self) -> int:
        if not self._free:
            raise NoFreeBlocks(self.device.value)
        return self._free.pop()

    def free(self, block: int) -> None:
        self._free.append(block)

    def num_free(self) -> int:
        return len(self._free)


@dataclass
class RequestBlocks:
    rid: str
    device: Device = Device.GPU
    table: list[int] = field(default_factory=list)


class SwapManager:
    def __init__(self, gpu: DevicePool, cpu: DevicePool, gpu_kv: torch.Tensor, cpu_kv: torch.Tensor) -> None:
        self.pools = {Device.GPU: gpu, Device.CPU: cpu}
        self.gpu_kv = gpu_kv
        self.cpu_kv = cpu_kv
        self.requests: dict[str, RequestBlocks] = {}

    def create(self, rid: str, n: int) -> RequestBlocks:
        gpu = self.pools[Device.GPU]
        if gpu.num_free() < n:
            raise NoFreeBlocks(rid)
        req = RequestBlocks(rid, Device.GPU, [gpu.allocate() for _ in range(n)])  # clean: registered by rid, free_request() frees
        self.requests[rid] = req
        return req

    def swap_out(self, rid: str) -> bool:
        req = self.requests[rid]
        gpu, cpu = self.pools[Device.GPU], self.pools[Device.CPU]
        if cpu.num_free() < len(req.table):
            return False
        new_table: list[int] = []
        for src in req.table:
            dst = cpu.allocate()  # clean: near miss, becomes the request's table and the gpu block is freed
            self.cpu_kv[dst].copy_(self.gpu_kv[src])
            gpu.free(src)
            new_table.append(dst)
        req.table = new_table
        req.device = Device.CPU
        return True

    def swap_in(self, rid: str) -> bool:
        req = self.requests[rid]
        gpu, cpu = self.pools[Device.GPU], self.pools[Device.CPU]
        new_table: list[int] = []
        for src in req.table:
            try:
                dst = gpu.allocate()  # leak: running out half way returns False and forgets the new table
            except NoFreeBlocks:
                logger.warning("swap in of %s stopped", rid)
                return False
            self.gpu_kv[dst].copy_(self.cpu_kv[src])
            new_table.append(dst)
        for src in req.table:
            cpu.free(src)
        req.table = new_table
        req.device = Device.GPU
        return True

    def swap_in_partial(self, rid: str) -> int:
        """Swaps in as many blocks as fit; the rest stays on the CPU in a second request."""
        req = self.requests[rid]
        gpu, cpu = self.pools[Device.GPU], self.pools[Device.CPU]
        moved: list[int] = []
        rest = list(req.table)
        while rest and gpu.num_free():
            dst = gpu.allocate()  # clean: near miss, the part that fits is registered as its own request
            src = rest.pop(0)
            self.gpu_kv[dst].copy_(self.cpu_kv[src])
            cpu.free(src)
            moved.append(dst)
        self.requests[rid + ":cpu"] = RequestBlocks(rid, Device.CPU, rest)
        self.requests[rid] = RequestBlocks(rid, Device.GPU, moved)
        return len(moved)

    def append_block(self, rid: str) -> bool:
        req = self.requests[rid]
        block = self.pools[req.device].allocate()  # leak: a request on the CPU gets no block, but one was taken from its pool
        if req.device is Device.CPU:
            return False
        req.table.append(block)
        return True

    def duplicate(self, rid: str, new_rid: str) -> RequestBlocks:
        src = self.requests[rid]
        pool = self.pools[src.device]
        kv = self.gpu_kv if src.device is Device.GPU else self.cpu_kv
        table = []
        for b in src.table:
            nb = pool.allocate()  # clean: the copy is registered under its own id
            kv[nb].copy_(kv[b])
            table.append(nb)
        self.requests[new_rid] = RequestBlocks(new_rid, src.device, table)
        return self.requests[new_rid]

    def shrink(self, rid: str, keep: int) -> None:
        req = self.requests[rid]
        for b in req.table[keep:]:
            self.pools[req.device].free(b)
        req.table = req.table[:keep]

    def free_request(self, rid: str) -> None:
        for key in (rid, rid + ":cpu"):
            req = self.requests.pop(key, None)
            if req is None:
                continue
            for b in req.table:
                self.pools[req.device].free(b)
            req.table = []

    def bandwidth_test(self, rounds: int) -> int:
        a = self.pools[Device.GPU].allocate()  # clean: freed after the rounds
        b = self.pools[Device.CPU].allocate()  # leak: freed to the pool only when rounds is positive
        copied = 0
        for _ in range(rounds):
            self.cpu_kv[b].copy_(self.gpu_kv[a])
            copied += self.gpu_kv[a].numel()
        self.pools[Device.GPU].free(a)
        if copied:
            self.pools[Device.CPU].free(b)
        return copied
