"""A pool of pinned host memory near one GPU: for copies that run beside computation.

Blocks are mappings bound to the GPU's memory node, then page-locked with cudaHostRegister. A copy may still
run when its tensor has died, so a block goes through fences (fences.py) before it is used again.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import torch

from reference_modules.pool.errors import PoolError
from reference_modules.pool.fences import EventFences
from reference_modules.pool.numa import Placement, bind, gpu_address, near_gpu
from reference_modules.pool.store import BlockStore
from reference_modules.pool.tensor_pool import TensorPool


class PinnedMemory:
    """Makes page-locked mappings. `cuda` is torch.cuda, or a stand-in in tests."""

    clears = True

    def __init__(self, placement: Placement, cuda: Any = None) -> None:
        self.placement = placement
        self._cuda = cuda or torch.cuda

    def make(self, nbytes: int) -> memoryview:
        """A mapping on the node, locked; OSError where it cannot be had, and nothing stays behind."""
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._place(address, nbytes)
        runtime = self._cuda.cudart()
        error = int(runtime.cudaHostRegister(address, nbytes, 0))
        if error:
            raise OSError(f"cudaHostRegister refused {nbytes} bytes with CUDA error {error}")
        weakref.finalize(mapped, _unlock, runtime, address, os.getpid()).atexit = False
        return memoryview(mapped)

    def _place(self, address: int, nbytes: int) -> None:
        node = self.placement.node
        if node is None:
            return
        try:
            bind(address, nbytes, node)
        except OSError as error:  # a container may forbid it: pinned memory elsewhere is still pinned memory
            self.placement = Placement(None, f"the system refused node {node}: {error}")


def _unlock(runtime: Any, address: int, made_in: int) -> None:
    """Before the mapping goes; in a forked child the lock is the parent's."""
    if os.getpid() == made_in:
        runtime.cudaHostUnregister(address)


class PinnedPool(TensorPool):
    """A pool of pinned CPU tensors on the memory node of one GPU."""

    def __init__(
        self,
        near: str | int | torch.device = "cuda:0",
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        tracking: bool = False,
    ) -> None:
        if not torch.cuda.is_available():
            raise PoolError(
                "pinned memory needs a CUDA device and this torch sees none; use TensorPool('cpu')"
            )
        device = torch.device(near)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._near = torch.device("cuda", index)
        self._memory = PinnedMemory(near_gpu(gpu_address(index)))
        super().__init__(
            "cpu",
            name=name or f"pinned-{self._near}",
            max_bytes=max_bytes,
            threshold_mb=0,
            tracking=tracking,
            store=BlockStore(self._memory, fences=EventFences(self._near)),
        )

    @property
    def placement(self) -> Placement:
        """The node the blocks come from; or None, and why it is left to the system."""
        return self._memory.placement

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._settings
        return _made_again, (self._near, settings.name, settings.max_bytes, settings.tracking)


def _made_again(near: torch.device, name: str, max_bytes: int | None, tracking: bool) -> PinnedPool:
    return PinnedPool(near, name=name, max_bytes=max_bytes, tracking=tracking)
