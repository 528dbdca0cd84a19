"""One big host arena for offloaded activations, carved into regions first fit."""

import contextlib
import logging
from bisect import insort
from dataclasses import dataclass

import numpy as np

logger = logging.getLogger(__name__)

ALIGN = 256
MIN_SPLIT = 4096


class OutOfArena(MemoryError):
    pass


@dataclass(order=True)
class Region:
    start: int
    size: int


def _round(n):
    return (n + ALIGN - 1) // ALIGN * ALIGN


class Arena:
    def __init__(self, nbytes):
        self._mem = np.empty(nbytes, np.uint8)
        self._holes = [Region(0, nbytes)]
        self._used = 0

    def carve(self, nbytes):
        size = _round(nbytes)
        for i, hole in enumerate(self._holes):
            if hole.size >= size:
                break
        else:
            raise OutOfArena(f"{size} bytes, {len(self._holes)} holes")
        hole = self._holes.pop(i)  # leak: a remainder below MIN_SPLIT is neither put back nor part of the region
        rest = hole.size - size
        if rest >= MIN_SPLIT:
            insort(self._holes, Region(hole.start + size, rest))
        self._used += size
        return Region(hole.start, size)

    def mend(self, region):
        self._used -= region.size
        insort(self._holes, region)
        merged = []
        for hole in self._holes:
            if merged and merged[-1].start + merged[-1].size == hole.start:
                merged[-1] = Region(merged[-1].start, merged[-1].size + hole.size)
            else:
                merged.append(hole)
        self._holes = merged

    def array(self, region, shape, dtype):
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._mem[region.start : region.start + n].view(dtype).reshape(shape)

    @contextlib.contextmanager
    def scoped(self, nbytes):
        region = self.carve(nbytes)  # clean: finally
        try:
            yield region
        finally:
            self.mend(region)


class Offload:
    """What forward() saves, backward() loads and gives up."""

    def __init__(self, arena):
        self._arena = arena
        self.training = True

    def save(self, x):
        region = self._arena.carve(x.nbytes)  # clean: returned with its shape
        self._arena.array(region, x.shape, x.dtype)[...] = x
        return region, x.shape, x.dtype

    def load(self, saved):
        region, shape, dtype = saved
        out = self._arena.array(region, shape, dtype).copy()
        self._arena.mend(region)
        return out


class Linear:
    def __init__(self, weight, offload):
        self.weight = weight
        self.grad = np.zeros_like(weight)
        self._offload = offload
        self._saved = None

    def forward(self, x):
        y = x @ self.weight
        saved = self._offload.save(x)  # leak: without training there is no backward, and the saved input is only a local name
        if not self._offload.training:
            return y
        self._saved = saved
        return y

    def backward(self, dy):
        x = self._offload.load(self._saved)
        self._saved = None
        self.grad += x.T @ dy
        return dy @ self.weight.T


class Gelu:
    def __init__(self, offload):
        self._offload = offload
        self._stack = []

    def forward(self, x):
        if self._offload.training:
            self._stack.append(self._offload.save(x))  # clean: backward() pops and reset() empties the stack
        return 0.5 * x * (1 + np.tanh(0.79788456 * (x + 0.044715 * x**3)))

    def backward(self, dy):
        x = self._offload.load(self._stack.pop())
        t = np.tanh(0.79788456 * (x + 0.044715 * x**3))
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.79788456 * (1 + 0.134145 * x * x))

    def reset(self):
        while self._stack:
            self._offload.load(self._stack.pop())


class Tape:
    """Activations by microbatch; a failed microbatch is discarded as a whole."""

    def __init__(self, offload):
        self._offload = offload
        self._by_mb = {}

    def record(self, mb, x):
        self._by_mb.setdefault(mb, []).append(self._offload.save(x))  # leak: discard() drops the list without loading or mending

    def replay(self, mb):
        saved = self._by_mb.pop(mb, [])
        for item in reversed(saved):
            yield self._offload.load(item)

    def discard(self, mb):
        dropped = self._by_mb.pop(mb, None)
        if dropped:
            logger.warning("microbatch %d: %d activations discarded", mb, len(dropped))


class Workspace:
    """Scratch that only ever grows."""

    def __init__(self, arena):
        self._arena = arena
        self._region = None

    def ensure(self, nbytes):
        if self._region is not None and self._region.size >= nbytes:
            return self._region
        if self._region is not None:
            self._arena.mend(self._region)
            self._region = None
        self._region = self._arena.carve(nbytes)  # clean: near miss, the smaller one was mended before, close() mends the last
        return self._region

    def close(self):
        if self._region is not None:
            self._arena.mend(self._region)
            self._region = None


class KVSpill:
    """Two regions a layer; either both are there or none."""

    def __init__(self, arena):
        self._arena = arena
        self._layers = {}

    def put(self, layer, keys, values):
        self.drop(layer)
        k = self._arena.carve(keys.nbytes)  # clean: near miss, mended when there is no room for the values
        try:
            v = self._arena.carve(values.nbytes)  # clean: kept in the table, drop() mends it
        except OutOfArena:
            self._arena.mend(k)
            return False
        self._arena.array(k, keys.shape, keys.dtype)[...] = keys
        self._arena.array(v, values.shape, values.dtype)[...] = values
        self._layers[layer] = (k, v)
        return True

    def drop(self, layer):
        for region in self._layers.pop(layer, ()):
            self._arena.mend(region)

    def close(self):
        for layer in list(self._layers):
            self.drop(layer)


def exchange(arena, send, recv_nbytes, all_to_all):
    out = arena.carve(send.nbytes)  # leak: carving the receive side raises OutOfArena while this one is held
    inp = arena.carve(recv_nbytes)  # clean: finally
    try:
        staged = arena.array(out, send.shape, send.dtype)
        staged[...] = send
        target = arena.array(inp, (recv_nbytes // send.itemsize,), send.dtype)
        all_to_all(staged, target)
        return target.copy()
    finally:
        arena.mend(inp)
        arena.mend(out)


def quantize_all(arena, tensors):
    """Returns name -> (int8 array, scale); all-zero tensors have no entry."""
    packed = {}
    for name, t in tensors.items():
        region = arena.carve(t.size)  # leak: a tensor of zeros is skipped with its region carved
        scale = float(np.abs(t).max()) / 127
        if scale == 0.0:
            logger.debug("%s is all zero", name)
            continue
        q = arena.array(region, t.shape, np.int8)
        np.clip(np.rint(t / scale), -127, 127, out=q, casting="unsafe")
        packed[name] = (q.copy(), scale)
        arena.mend(region)
    return packed


def gather_rows(arena, table, index):
    need = len(index) * table.shape[1] * table.itemsize
    region = None
    try:
        region = arena.carve(need)  # clean: near miss, None in the finally only when carve() failed
        out = arena.array(region, (len(index), table.shape[1]), table.dtype)
    except OutOfArena:
        return table[index]
    else:
        np.take(table, index, axis=0, out=out)
        return out.copy()
    finally:
        if region is not None:
            arena.mend(region)


def softmax_chunks(arena, logits, rows):
    for start in range(0, len(logits), rows):
        part = logits[start : start + rows]
        with arena.scoped(part.nbytes) as region:  # clean: context manager
            tmp = arena.array(region, part.shape, part.dtype)
            np.exp(part - part.max(axis=1, keepdims=True), out=tmp)
            yield tmp / tmp.sum(axis=1, keepdims=True)
