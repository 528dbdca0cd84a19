"""MemoryPoolMixin: pooled temporaries for an nn.Module. One file that works alone with only torch.

    class Block(MemoryPoolMixin, nn.Module):
        def __init__(self, enable_memory_pool=False, memory_pool_threshold_mb=None):
            super().__init__()
            self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb)

Beside `reference_modules.pool` it uses that package's pools; copied alone into a repository it brings
`SmallPool`, with the same rule: memory is used again when nothing refers to its lease's storage any more.
"""

from __future__ import annotations

import math
import mmap
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

import torch

Shape = Sequence[int]
Where = torch.device | str | None
DEFAULT_THRESHOLD_BYTES = 16 << 20
MOST_IDLE_BYTES = 1 << 30


class SmallPool:
    """A minimal lease pool for CPU tensors of 16 MB and more; all else is plain torch memory."""

    def __init__(self, *, name: str = "vendored") -> None:
        self.name = name
        self._lock = threading.RLock()
        self._leases: dict[int, weakref.ref[torch.Tensor]] = {}
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lent: dict[int, tuple[weakref.ref[memoryview], mmap.mmap]] = {}
        """By the id of the signal: a weak reference to a writable memoryview has no hash."""
        self._died: deque[weakref.ref[memoryview]] = deque()
        self._idle_bytes = 0
        self._figures = {"abandoned": 0, "hits": 0, "misses": 0, "bypassed": 0}

    def allocate_above(
        self,
        threshold_bytes: int,
        shape: Shape,
        dtype: torch.dtype,
        device: Where = None,
        *,
        zero: bool = False,
    ) -> torch.Tensor:
        """A fresh tensor that owes one `deallocate`; pooled if it is at least this large."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            self._settle()
            if torch.device(device or "cpu").type != "cpu" or nbytes < max(threshold_bytes, 1):
                tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
                self._figures["bypassed"] += 1
            else:
                tensor = self._over_memory(nbytes, shape, dtype)
            self._figures["abandoned"] += (
                id(tensor) in self._leases
            )  # whose tensor has died, or it had its id
            self._leases[id(tensor)] = weakref.ref(tensor)
        return tensor.zero_() if zero else tensor

    allocate = partialmethod(allocate_above, DEFAULT_THRESHOLD_BYTES)

    def deallocate(self, tensor: torch.Tensor) -> None:
        """End the lease; its memory is used again when the last alias has died."""
        with self._lock:
            lease = self._leases.pop(id(tensor), None)
            if lease is None or lease() is not tensor:
                raise RuntimeError(f"pool {self.name!r}: tensor released twice, or never allocated here")

    def stats(self) -> dict[str, int]:
        """Leases without deallocate, idle bytes, and how allocations were served."""
        with self._lock:
            self._settle()
            leases = len(self._leases) + self._figures["abandoned"]
            return {"leases": leases, "idle_bytes": self._idle_bytes, **self._figures}

    def close(self) -> None:
        """Give idle memory back; tensors still referred to stay valid."""
        with self._lock:
            self._idle.clear()
            self._lent.clear()
            self._idle_bytes = 0

    def _over_memory(self, nbytes: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        idle = self._idle.get(nbytes)
        memory = idle.pop() if idle else None
        self._figures["misses" if memory is None else "hits"] += 1
        if memory is None:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._idle_bytes -= nbytes
        with torch.inference_mode(False):
            part = memoryview(memory)  # torch keeps it exactly as long as the storage lives
            tensor = torch.frombuffer(part, dtype=dtype).resize_(tuple(shape))
        signal = weakref.ref(part, self._died.append)
        self._lent[id(signal)] = signal, memory
        return tensor

    def _settle(self) -> None:
        while self._died:
            _, memory = self._lent.pop(id(self._died.popleft()), (None, None))
            if memory is not None and self._idle_bytes + len(memory) <= MOST_IDLE_BYTES:
                self._idle.setdefault(len(memory), []).append(memory)
                self._idle_bytes += len(memory)


_vendored = SmallPool()


def _pool_for(device: torch.device, own_name: str | None) -> Any:
    """The process's pool for the device, or a new one of this name; None where no pool lives."""
    try:
        from reference_modules.pool import TensorPool, get_global_memory_pool
    except ModuleNotFoundError:  # this file was copied alone
        return _vendored if own_name is None else SmallPool(name=own_name)
    if device.type not in ("cpu", "cuda"):
        return None
    if own_name is None:
        return get_global_memory_pool(device)
    return TensorPool(device, name=own_name, tracking=True)


class MemoryPoolMixin:
    """Gives a module temporaries from a pool. With the switch off every method is plain torch."""

    enable_memory_pool: bool = False
    memory_pool_threshold_mb: float | None = None
    lightweight_pool: bool = True
    _memory_pool: Any = None

    def _init_memory_pool(
        self,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float | None = None,
        lightweight_pool: bool = True,
        pool: Any = None,
    ) -> None:
        """Call once, after `super().__init__()`.

        `memory_pool_threshold_mb`: smaller tensors are plain torch; None leaves that to the pool (16 MB).
        `lightweight_pool`: share the process's pool; False makes one of the module's own, with call sites.
        `pool`: use exactly this one.
        """
        if memory_pool_threshold_mb is not None and not memory_pool_threshold_mb >= 0:
            wrong = f"memory_pool_threshold_mb={memory_pool_threshold_mb}"
            raise ValueError(f"{wrong} must be 0 or more, or None for the pool's own")
        self.enable_memory_pool = enable_memory_pool
        self.memory_pool_threshold_mb = memory_pool_threshold_mb
        self.lightweight_pool = lightweight_pool
        self._memory_pool = pool
        self._pool_leases: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._own_pools: dict[torch.device, Any] = {}

    def _allocate_tensor(
        self, shape: Shape, dtype: torch.dtype, device: Where, *, zero_init: bool = True
    ) -> torch.Tensor:
        """A temporary: owes one `_deallocate_tensor`; never for what autograd keeps or a caller gets."""
        make = torch.zeros if zero_init else torch.empty
        if not self.enable_memory_pool:
            return make(tuple(shape), dtype=dtype, device=device)
        home = torch.device(device) if device is not None else torch.get_default_device()
        pool, threshold_mb = self._pool_on(home), self.memory_pool_threshold_mb
        tensor: torch.Tensor
        if pool is None:
            tensor = make(tuple(shape), dtype=dtype, device=home)
        elif threshold_mb is None:
            tensor = pool.allocate(tuple(shape), dtype, home, zero=zero_init)
        else:
            tensor = pool.allocate_above(int(threshold_mb * (1 << 20)), shape, dtype, home, zero=zero_init)
        leases, key = self._pool_leases, id(tensor)
        forget = weakref.ref(tensor, lambda _: leases.pop(key, None))  # the pool counts it as abandoned
        leases[key] = forget, pool
        return tensor

    def _deallocate_tensor(self, tensor: torch.Tensor) -> None:
        """Give a temporary back. With the switch off, what was plain torch memory needs nothing."""
        lease, pool = None, None
        if self._has_pool_state() and self._pool_leases:  # else no `id`, which older compilers break at
            lease, pool = self._pool_leases.pop(id(tensor), (None, None))
        if lease is not None and lease() is tensor:
            if pool is not None:
                pool.deallocate(tensor)
            return
        if not self.enable_memory_pool:
            return
        pool = self._pool_on(tensor.device)
        if pool is None:
            raise ValueError(
                f"{type(self).__name__}: tensor released twice, or never allocated by this module"
            )
        pool.deallocate(tensor)  # not ours: the pool says what is wrong, and where

    @contextmanager
    def _lease_tensor(
        self, shape: Shape, dtype: torch.dtype, device: Where, *, zero_init: bool = True
    ) -> Iterator[torch.Tensor]:
        """A temporary for the length of a `with` block, given back on every way out."""
        tensor = self._allocate_tensor(shape, dtype, device, zero_init=zero_init)
        try:
            yield tensor
        finally:
            self._deallocate_tensor(tensor)

    def cleanup_memory_pool(self) -> None:
        """Give back every temporary this module still holds and close the pools of its own. May be called
        again.
        """
        if not self._has_pool_state():
            return
        leases, self._pool_leases = self._pool_leases, {}
        pools, self._own_pools = self._own_pools, {}
        with ExitStack() as everything:  # one failure must not keep the rest from going back
            for pool in filter(None, pools.values()):
                everything.callback(pool.close)
            for lease, pool in leases.values():
                tensor = lease()
                if tensor is not None and pool is not None:
                    everything.callback(pool.deallocate, tensor)

    @contextmanager
    def memory_pool_scope(self) -> Iterator[None]:
        """Everything this module holds at the end of the `with` block is given back."""
        try:
            yield
        finally:
            self.cleanup_memory_pool()

    def get_memory_info(self) -> dict[str, Any]:
        """The switch, the threshold, what this module holds now, and the figures of each pool it uses."""
        leases = self._pool_leases if self._has_pool_state() else {}
        held = [tensor for tensor in (lease() for lease, _ in leases.values()) if tensor is not None]
        used = [pool for _, pool in leases.values()]
        used += [self._memory_pool] if self.enable_memory_pool else []
        used += self._own_pools.values() if self._has_pool_state() else []
        return {
            "enabled": self.enable_memory_pool,
            "threshold_mb": self.memory_pool_threshold_mb,
            "lightweight": self.lightweight_pool,
            "leases": len(held),
            "bytes_in_use": sum(tensor.numel() * tensor.element_size() for tensor in held),
            "pools": {pool.name: pool.stats() for pool in used if pool is not None},
        }

    def _pool_on(self, device: torch.device) -> Any:
        """The pool for this device, None where there is none: then the module steps aside to plain torch."""
        given = self._memory_pool
        if given is not None:
            home = getattr(given, "device", device)
            return given if home.type == device.type and device.index in (None, home.index) else None
        if self.lightweight_pool:
            return _pool_for(device, None)
        if device not in self._own_pools:
            self._own_pools[device] = _pool_for(device, f"{type(self).__name__}-{id(self):x}-{device}")
        return self._own_pools[device]

    def _has_pool_state(self) -> bool:
        return "_pool_leases" in self.__dict__  # not where `_init_memory_pool` was never called

    def __getstate__(self) -> Any:
        """Pickles and deep-copies without pool and leases; the copy keeps the switch."""
        state = super().__getstate__()
        if not isinstance(state, dict) or "_pool_leases" not in state:
            return state
        return {**state, "_memory_pool": None, "_pool_leases": {}, "_own_pools": {}}

    def __del__(self) -> None:
        try:
            self.cleanup_memory_pool()
        except RuntimeError as error:  # a finaliser must not raise; the leak must not stay silent either
            warnings.warn(str(error), ResourceWarning, stacklevel=1)


def set_memory_pool(
    module: torch.nn.Module, pool: Any | None, *, memory_pool_threshold_mb: float | None = None
) -> int:
    """Hand a pool to every pooled module of the tree, or switch all off with None; returns how many.
    Temporaries that are out go back to the pool they came from, whatever was set since.
    """
    switched = 0
    child: Any
    for child in module.modules():
        if hasattr(child, "_init_memory_pool"):  # by name, because a vendored copy is another class
            if "_pool_leases" not in child.__dict__:
                child._init_memory_pool()
            child.enable_memory_pool = pool is not None
            child._memory_pool = pool
            if memory_pool_threshold_mb is not None:
                child.memory_pool_threshold_mb = memory_pool_threshold_mb
            switched += 1
    return switched
