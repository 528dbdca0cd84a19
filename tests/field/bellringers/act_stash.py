"""Activation stash for selective recomputation.

Blocks are reference counted: pack() gives a handle with count one, share()
adds a reference, and the block returns to its free list at zero.
"""
import threading
import weakref
from collections import OrderedDict

import torch


class Block:
    def __init__(self, bid, data):
        self.bid = bid
        self.data = data
        self.refs = 0


class BlockTable:
    def __init__(self, count, numel, device="cuda"):
        self._blocks = [Block(i, torch.empty(numel, device=device)) for i in range(count)]
        self._free = [b.bid for b in self._blocks]
        self._lock = threading.RLock()

    def grab(self):
        with self._lock:
            if not self._free:
                return None
            b = self._blocks[self._free.pop()]
            b.refs = 1
            return b

    def grab_run(self, n):
        """n blocks or none at all."""
        with self._lock:
            if len(self._free) < n:
                return []
            out = []
            for _ in range(n):
                b = self._blocks[self._free.pop()]  # clean: returned in the list
                b.refs = 1
                out.append(b)
            return out

    def grab_near(self, bid):
        """A free block within eight of bid, else whichever is next."""
        with self._lock:
            fallback = None
            for _ in range(len(self._free)):
                i = self._free.pop(0)  # leak: a second far block replaces the fallback and is out of the list
                if abs(i - bid) <= 8:
                    if fallback is not None:
                        self._free.append(fallback)
                    self._blocks[i].refs = 1
                    return self._blocks[i]
                fallback = i
            if fallback is None:
                return None
            self._blocks[fallback].refs = 1
            return self._blocks[fallback]

    def share(self, b):
        with self._lock:
            b.refs += 1
            return b

    def unref(self, b):
        with self._lock:
            b.refs -= 1
            if b.refs == 0:
                self._free.append(b.bid)


class StashScope:
    """with StashScope(table) as s: s.save(x) ... blocks go back on exit."""

    def __init__(self, table, keep_on_error=False):
        self.table = table
        self.keep_on_error = keep_on_error
        self.saved = []

    def __enter__(self):
        return self

    def save(self, x):
        b = self.table.grab()  # leak: __exit__ returns before the unrefs when keep_on_error is set and the body raised
        if b is None:
            return False
        b.data[:x.numel()].copy_(x.view(-1))
        self.saved.append(b)
        return True

    def __exit__(self, et, ev, tb):
        if et is not None and self.keep_on_error:
            self.saved = []
            return False
        while self.saved:
            self.table.unref(self.saved.pop())
        return False


class BlockGuard:
    def __init__(self, table):
        self.table = table
        self.block = None

    def __enter__(self):
        self.block = self.table.grab()  # clean: __exit__ unrefs it unless it is None or detached
        return self

    def detach(self):
        b, self.block = self.block, None
        return b

    def __exit__(self, *exc):
        if self.block is None:
            return False
        self.table.unref(self.block)
        self.block = None
        return False


class Packed:
    def __init__(self, block, shape):
        self.block = block
        self.shape = shape


class SavedTensorHooks(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, table, min_numel):
        self.table = table
        self.min_numel = min_numel
        super().__init__(self.pack, self.unpack)

    def pack(self, x):
        if x.numel() < self.min_numel:
            return x
        b = self.table.grab()  # clean: near miss, the finalizer of the packed object unrefs it
        if b is None:
            return x
        b.data[:x.numel()].copy_(x.reshape(-1))
        packed = Packed(b, x.shape)
        weakref.finalize(packed, self.table.unref, b)
        return packed

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        shape = packed.shape
        return packed.block.data[:shape.numel()].view(shape).clone()


class LruStash:
    def __init__(self, table, cap):
        self.table = table
        self.cap = cap
        self.by_layer = OrderedDict()

    def put(self, layer, x):
        old = self.by_layer.pop(layer, None)
        if old is not None:
            self.table.unref(old)
        b = self.table.grab()  # clean: near miss, held by layer, replaced and evicted ones are unreffed
        if b is None:
            return False
        b.data[:x.numel()].copy_(x.view(-1))
        self.by_layer[layer] = b
        while len(self.by_layer) > self.cap:
            _, victim = self.by_layer.popitem(last=False)
            self.table.unref(victim)
        return True

    def view(self, layer, shape):
        b = self.by_layer.get(layer)
        if b is None:
            return None
        ref = self.table.share(b)  # leak: the reference is not dropped when the shape does not match
        if shape.numel() > ref.data.numel():
            return None
        out = ref.data[:shape.numel()].view(shape).clone()
        self.table.unref(ref)
        return out

    def lend(self, layer):
        b = self.by_layer.get(layer)
        if b is None:
            return None
        return self.table.share(b)  # clean: returned to the caller

    def clear(self):
        while self.by_layer:
            self.table.unref(self.by_layer.popitem()[1])


def layer_norms(stash, table, layers):
    norms = {}
    for layer in layers:
        b = stash.lend(layer)  # leak: not unreffed for a layer whose norm is zero
        if b is None:
            continue
        n = float(b.data.norm())
        if n == 0.0:
            continue
        norms[layer] = n
        table.unref(b)
    return norms


def layer_means(stash, table, layers):
    means = {}
    for layer in layers:
        b = stash.lend(layer)  # clean: unreffed before the zero test
        if b is None:
            continue
        m = float(b.data.mean())
        table.unref(b)
        if m == 0.0:
            continue
        means[layer] = m
    return means


def attach(table, module_out, x):
    """Keep x's copy as long as module_out is alive."""
    b = table.grab()  # clean: near miss, a finalizer unrefs it when module_out goes
    if b is None:
        return None
    b.data[:x.numel()].copy_(x.view(-1))
    weakref.finalize(module_out, table.unref, b)
    return b.data[:x.numel()]


def spread(table, x, parts):
    blocks = table.grab_run(parts)  # leak: only parts minus one are unreffed
    if not blocks:
        return x
    chunks = x.view(-1).chunk(parts)
    for b, c in zip(blocks, chunks):
        b.data[:c.numel()].copy_(c)
    out = torch.cat([b.data[:c.numel()] for b, c in zip(blocks, chunks)])
    for b in blocks[1:]:
        table.unref(b)
    return out


def save_if_large(table, x, limit):
    with BlockGuard(table) as g:  # clean: the guard unrefs it unless it is detached to the caller
        if g.block is None or x.numel() < limit:
            return None
        g.block.data[:x.numel()].copy_(x.view(-1))
        return g.detach()


def recompute_all(table, stash, layers, run):
    done = 0
    for layer in layers:
        mine = save_if_large(table, layer.inp, 1024)  # clean: unreffed in finally when there is one
        try:
            run(layer, mine.data if mine is not None else layer.inp)
            done += 1
        finally:
            if mine is not None:
                table.unref(mine)
    return done
