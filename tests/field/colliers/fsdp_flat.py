"""Cut-down FSDP: flat parameters with pooled unshard buffers.

We keep this next to the real thing because upstream FSDP's caching allocator
behaviour was fragmenting at 13B on the old cluster.
"""
from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any, Optional

try:
    import torch
    import torch.distributed as dist
except ImportError:  # CPU login nodes
    torch = None
    dist = None

log = logging.getLogger("fsdp_flat")


def _new_storage(numel: int, dtype: str) -> Any:
    if torch is None:
        return bytearray(numel)
    return torch.empty(numel, dtype=getattr(torch, dtype), device="cuda")


class UnshardPool:
    """Exact-size buckets. `borrow` may return None when the cap is hit."""

    def __init__(self, cap_numel: int) -> None:
        self.cap = cap_numel
        self.outstanding = 0
        self._buckets: dict[tuple[int, str], list[Any]] = defaultdict(list)

    def borrow(self, numel: int, dtype: str = "bfloat16") -> Optional[Any]:
        if self.outstanding + numel > self.cap:
            return None
        bucket = self._buckets[(numel, dtype)]
        buf = bucket.pop() if bucket else _new_storage(numel, dtype)
        self.outstanding += numel
        return buf

    def give_back(self, buf: Any, dtype: str = "bfloat16") -> None:
        self.outstanding -= len(buf)
        self._buckets[(len(buf), dtype)].append(buf)


class FlatHandle:
    def __init__(self, name: str, numel: int, pool: UnshardPool, *, world: int = 1,
                 grad_dtype: str = "bfloat16", keep_full: bool = False) -> None:
        self.name = name
        self.numel = numel
        self.pool = pool
        self.world = world
        self.grad_dtype = grad_dtype
        self.keep_full = keep_full
        self.require_sync = True
        self.local = bytearray(numel // world)
        self._full: Optional[Any] = None
        self._grad: Optional[Any] = None
        self._acc: Optional[Any] = None

    # -- parameters ---------------------------------------------------------
    def unshard(self) -> bool:
        if self._full is not None:
            return True
        self._full = self.pool.borrow(self.numel)  # clean: reshard gives it back
        if self._full is None:
            log.warning("no room to unshard %s", self.name)
            return False
        self._all_gather(self._full)
        return True

    def reshard(self) -> None:
        if self._full is None or self.keep_full:
            return
        full, self._full = self._full, None
        self.pool.give_back(full)

    def _all_gather(self, out: Any) -> None:
        if dist is not None and dist.is_initialized():
            dist.all_gather_into_tensor(out, self.local)
            return
        n = len(self.local)
        for r in range(self.world):
            out[r * n:(r + 1) * n] = self.local

    def gather_full(self) -> Optional[Any]:
        """Unsharded copy for state dicts; the caller gives it back to the pool."""
        out = self.pool.borrow(self.numel)  # clean: returned to the caller
        if out is not None:
            self._all_gather(out)
        return out

    # -- gradients ----------------------------------------------------------
    def pre_backward(self) -> None:
        self._grad = self.pool.borrow(self.numel)  # leak: under no_sync post_backward returns with it held and the next pre_backward overwrites it

    def post_backward(self) -> None:
        if self._grad is None:
            return
        if not self.require_sync:
            self._accumulate(self._grad)
            return
        self._reduce_scatter(self._grad)
        self.pool.give_back(self._grad)
        self._grad = None

    def _accumulate(self, g: Any) -> None:
        if self._acc is None:
            self._acc = self.pool.borrow(self.numel, "float32")  # clean: taken once per accumulation window, flush_acc gives it back
            if self._acc is None:
                raise RuntimeError(f"{self.name}: accumulation buffer over cap")
        for i in range(0, self.numel, 4096):
            self._acc[i] = (self._acc[i] + g[i]) & 0xFF

    def flush_acc(self) -> None:
        if self._acc is not None:
            self._reduce_scatter(self._acc)
            self.pool.give_back(self._acc, "float32")
            self._acc = None

    def _reduce_scatter(self, g: Any) -> None:
        if dist is not None and dist.is_initialized():
            dist.reduce_scatter_tensor(self.local, g)

    def reduce_in_fp32(self, g: Any) -> None:
        upcast = self.grad_dtype != "float32"
        if upcast:
            wide = self.pool.borrow(self.numel, "float32")  # clean: near miss, given back under the same flag below
            if wide is None:
                raise RuntimeError("fp32 reduce over cap")
            wide[:] = g
        else:
            wide = g
        self._reduce_scatter(wide)
        log.debug("reduced %s", self.name)
        if upcast:
            self.pool.give_back(wide, "float32")


class FlatModel:
    def __init__(self, handles: list[FlatHandle], pool: UnshardPool) -> None:
        self.handles = handles
        self.pool = pool

    def forward(self) -> None:
        for h in self.handles:
            if not h.unshard():
                raise RuntimeError(h.name)
            h.reshard()

    def full_state_dict(self, rank0_only: bool = True, rank: int = 0) -> dict[str, bytes]:
        out: dict[str, bytes] = {}
        for h in self.handles:
            full = h.gather_full()  # leak: rank != 0 continues without giving it back
            if full is None:
                continue
            if rank0_only and rank != 0:
                continue
            out[h.name] = bytes(full)
            self.pool.give_back(full)
        return out

    def checksum(self) -> int:
        total = 0
        for h in self.handles:
            full = h.gather_full()  # leak: summed and dropped
            if full is not None:
                total += sum(full)
        return total

    def broadcast_buffers(self, fp32: bool = False) -> None:
        for h in self.handles:
            staging = self.pool.borrow(h.numel)  # leak: rebound by the fp32 borrow
            if staging is None:
                continue
            dtype = "bfloat16"
            if fp32:
                dtype = "float32"
                staging = self.pool.borrow(h.numel, dtype)  # clean: given back at the end of the loop body
                if staging is None:
                    break
            staging[:len(h.local)] = h.local
            self.pool.give_back(staging, dtype)

    def swap_pair(self, a: FlatHandle, b: FlatHandle) -> bool:
        """Double-buffered unshard of two layers at once."""
        fa = self.pool.borrow(a.numel)  # clean: near miss, both exits give it back
        if fa is None:
            return False
        fb = self.pool.borrow(b.numel)  # clean: given back in the finally
        if fb is None:
            self.pool.give_back(fa)
            return False
        try:
            a._all_gather(fa)
            b._all_gather(fb)
        finally:
            self.pool.give_back(fb)
            self.pool.give_back(fa)
        return True


if __name__ == "__main__":
    pool = UnshardPool(1 << 20)
    model = FlatModel([FlatHandle(f"layer{i}", 8192, pool) for i in range(3)], pool)
    model.forward()
    model.swap_pair(model.handles[0], model.handles[1])
    for h in model.handles:
        h.pre_backward()
        h.post_backward()
    print("outstanding", pool.outstanding, len(model.full_state_dict()))
