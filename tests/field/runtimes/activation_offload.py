"""Saved-tensor hooks that move activations to host slabs during forward."""
import collections
import threading

import torch


class Slab:
    __slots__ = ("index", "storage", "owner")

    def __init__(self, index, storage):
        self.index = index
        self.storage = storage
        self.owner = None


class SlabPool:
    def __init__(self, slab_bytes, count):
        self.slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._slabs = [Slab(i, torch.empty(slab_bytes, dtype=torch.uint8)) for i in range(count)]
        self._ready = collections.deque(self._slabs)

    def acquire(self, owner=None):
        with self._lock:
            if not self._ready:
                return None
            slab = self._ready.popleft()  # clean: stamped with its owner and returned
            slab.owner = owner
            return slab

    def release(self, slab):
        with self._lock:
            slab.owner = None
            self._ready.append(slab)

    def steal(self, owner, minimum):
        with self._lock:
            taken = []
            while self._ready and len(taken) < minimum:
                taken.append(self._ready.popleft())  # leak: a short haul is thrown away by returning an empty list
            if len(taken) < minimum:
                return []
            for slab in taken:
                slab.owner = owner
            return taken


class Packed:
    def __init__(self, slab, shape, dtype, nbytes, device):
        self.slab = slab
        self.shape = shape
        self.dtype = dtype
        self.nbytes = nbytes
        self.device = device


class OffloadHooks:
    def __init__(self, pool, min_bytes=1 << 20):
        self._pool = pool
        self._min_bytes = min_bytes
        self._live = {}
        self._next = 0

    def pack(self, t):
        if t.nbytes < self._min_bytes or t.nbytes > self._pool.slab_bytes:
            return t
        slab = self._pool.acquire(owner=self)  # clean: near miss, stays in _live until unpack or reset
        if slab is None:
            return t
        slab.storage[: t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
        key = self._next
        self._next += 1
        self._live[key] = Packed(slab, t.shape, t.dtype, t.nbytes, t.device)
        return key

    def unpack(self, key):
        if isinstance(key, torch.Tensor):
            return key
        packed = self._live.pop(key)
        raw = packed.slab.storage[: packed.nbytes].to(packed.device)
        self._pool.release(packed.slab)
        return raw.view(packed.dtype).view(packed.shape)

    def reset(self):
        for packed in self._live.values():
            self._pool.release(packed.slab)
        self._live.clear()


class LayerOffloader:
    """Offloads whole layer inputs, keyed by layer index."""

    def __init__(self, pool):
        self._pool = pool
        self._by_layer = {}
        self._prefetched = {}

    def save(self, layer, t):
        slab = self._pool.acquire(owner=layer)  # clean: popped and released by load
        if slab is None:
            return False
        slab.storage[: t.nbytes].copy_(t.view(-1).view(torch.uint8))
        self._by_layer[layer] = (slab, t.shape, t.dtype)
        return True

    def load(self, layer):
        slab, shape, dtype = self._by_layer.pop(layer)
        try:
            n = shape.numel() * dtype.itemsize
            return slab.storage[:n].clone().view(dtype).view(shape)
        finally:
            self._pool.release(slab)

    def prefetch(self, layer, source):
        slab = self._pool.acquire(owner=layer)  # leak: take_prefetched pops the slab and nobody releases it
        if slab is None:
            return
        n = source.nbytes
        slab.storage[:n].copy_(source.view(-1).view(torch.uint8))
        self._prefetched[layer] = (slab, n)

    def take_prefetched(self, layer, device):
        entry = self._prefetched.pop(layer, None)
        if entry is None:
            return None
        slab, n = entry
        return slab.storage[:n].to(device)


class RecomputeGuard:
    def __init__(self, pool, keep_rng):
        self._pool = pool
        self._keep_rng = keep_rng
        self._rng_slab = None

    def before(self, state):
        if not self._keep_rng:
            return
        self._rng_slab = self._pool.acquire(owner="rng")  # clean: near miss, after releases under the same flag
        if self._rng_slab is not None:
            self._rng_slab.storage[: state.numel()].copy_(state)

    def after(self):
        if self._keep_rng and self._rng_slab is not None:
            self._pool.release(self._rng_slab)
            self._rng_slab = None


def offload_all(pool, tensors, budget):
    slabs = pool.steal("bulk", budget)  # clean: near miss, extra slabs beyond the tensors go back with the rest
    sums = []
    for slab, t in zip(slabs, tensors):
        slab.storage[: t.nbytes].copy_(t.view(-1).view(torch.uint8))
        sums.append(int(slab.storage[: t.nbytes].sum()))
    for slab in slabs:
        pool.release(slab)
    return sums


def offload_some(pool, tensors, budget):
    slabs = pool.steal("partial", budget)  # leak: zip stops at the shorter list, slabs without a tensor stay out
    sums = []
    for slab, t in zip(slabs, tensors):
        slab.storage[: t.nbytes].copy_(t.view(-1).view(torch.uint8))
        sums.append(int(slab.storage[: t.nbytes].sum()))
        pool.release(slab)
    return sums
