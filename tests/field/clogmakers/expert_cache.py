"""Keeps the hot experts of a mixture-of-experts model on the device.

All experts lie in mapped files.  The device has a number of slots per layer, an expert is loaded
into a slot when a token is routed to it and stays there until the slot is wanted for another one.
"""
import collections
import functools
import logging
import mmap
import os
import threading

import torch

L = logging.getLogger("moe.cache")


class LoadError(RuntimeError):
    pass


class NoSlot(RuntimeError):
    pass


class SlotBank:
    def __init__(self, layer, tensors):
        self.layer = layer
        self.tensors = tensors
        self.idle = list(range(len(tensors)))
        self.capacity = len(tensors)
        self.lock = threading.Lock()

    def take(self):
        with self.lock:
            return self.idle.pop() if self.idle else None  # clean: handed to the caller

    def back(self, slot):
        with self.lock:
            self.idle.append(slot)


class MappedFile:
    """A safetensors file, mapped once and counted."""

    def __init__(self, path):
        self.path = path
        fd = os.open(path, os.O_RDONLY)  # clean: closed in finally, the mapping does not need it
        try:
            self.map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)  # clean: close() unmaps when the last user has gone
        finally:
            os.close(fd)
        self.users = 1

    def close(self):
        self.users -= 1
        if self.users == 0:
            self.map.close()


class ExpertFiles:
    def __init__(self, root):
        self.root = root
        self.files = {}
        self.index = {}

    def open_layer(self, layer, version=0):
        path = os.path.join(self.root, f"layer_{layer:03d}.v{version}.safetensors")
        self.files[layer] = MappedFile(path)  # leak: reload() opens the new version over the entry of the old one
        self.index[layer] = version

    def reload(self, version):
        for layer in list(self.files):
            if self.index[layer] < version:
                self.open_layer(layer, version)

    def peek(self, path, n=64):
        f = MappedFile(path)  # clean: closed in finally
        try:
            return bytes(f.map[:n])
        finally:
            f.close()

    def read(self, layer, expert, out):
        f = self.files.get(layer)
        if f is None:
            raise LoadError(f"layer {layer} is not open")
        n = out.numel()
        lo = 8 + expert * n
        if lo + n > len(f.map):
            raise LoadError(f"expert {expert} of layer {layer} is cut off in {f.path}")
        out.copy_(torch.frombuffer(f.map, dtype=torch.uint8, count=n, offset=lo))

    def close(self):
        for f in self.files.values():
            f.close()
        self.files.clear()


class Residence:
    """An expert in its slot."""

    __slots__ = ("expert", "slot", "pins")

    def __init__(self, expert, slot):
        self.expert, self.slot, self.pins = expert, slot, 0


class LayerCache:
    def __init__(self, bank, files, pool):
        self.bank = bank
        self.files = files
        self.pool = pool
        self.resident = collections.OrderedDict()
        self.loading = {}
        self.arrived = collections.deque()
        self.hits = self.misses = 0

    def _evict(self):
        for expert, r in self.resident.items():
            if not r.pins:
                del self.resident[expert]
                return r.slot
        raise NoSlot(f"layer {self.bank.layer}: all {len(self.resident)} experts are pinned")

    def _slot(self):
        slot = self.bank.take()  # clean: a wrapper, None is replaced by the slot of another expert
        return self._evict() if slot is None else slot

    def pin(self, expert):
        """The residence of an expert, loaded if need be, unpin() when the kernel has been launched."""
        r = self.resident.get(expert)
        if r is None:
            self.misses += 1
            slot = self._slot()  # leak: LoadError of the read leaves the slot neither idle nor resident
            self.files.read(self.bank.layer, expert, self.bank.tensors[slot])
            r = self.resident[expert] = Residence(expert, slot)
        else:
            self.hits += 1
            self.resident.move_to_end(expert)
        r.pins += 1
        return r

    def unpin(self, r):
        r.pins -= 1

    def prefetch(self, expert):
        """Loads on a thread what the router will probably ask for."""
        if expert in self.resident or expert in self.loading:
            return None
        slot = self.bank.take()  # leak: _landed() looks only at loads that went well, the slot of a failed one is dropped
        if slot is None:
            return None
        fut = self.pool.submit(self.files.read, self.bank.layer, expert, self.bank.tensors[slot])
        self.loading[expert] = (fut, slot)
        return fut

    def _landed(self):
        for expert, (fut, slot) in list(self.loading.items()):
            if not fut.done():
                continue
            del self.loading[expert]
            if fut.exception() is None:
                self._settle(expert, slot)
        while self.arrived:
            expert, slot, then = self.arrived.popleft()
            self._settle(expert, slot)
            then(expert)

    def _settle(self, expert, slot):
        if expert in self.resident:
            self.bank.back(slot)
        else:
            self.resident[expert] = Residence(expert, slot)
            self.resident.move_to_end(expert, last=False)

    def load_in_background(self, expert, then):
        """One load with its own end, apart from the table of prefetches."""
        slot = self.bank.take()  # clean: near miss, the callback takes it back on failure, else it arrives and is settled like the others
        if slot is None:
            return False
        fut = self.pool.submit(self.files.read, self.bank.layer, expert, self.bank.tensors[slot])

        def landed(f):
            if f.cancelled() or f.exception() is not None:
                self.bank.back(slot)
            else:
                self.arrived.append((expert, slot, then))

        fut.add_done_callback(landed)
        return True

    def forward(self, x, routes, kernel):
        self._landed()
        pinned = [self.pin(e) for e in sorted(set(routes.tolist()))]  # leak: with no token for this rank it returns before the unpins
        if x.shape[0] == 0:
            return x
        table = {r.expert: r.slot for r in pinned}
        slots = torch.tensor([table[e] for e in routes.tolist()], device=x.device)
        out = kernel(x, self.bank.tensors, slots)
        for r in pinned:
            self.unpin(r)
        return out

    def forward_chunked(self, x, routes, kernel, chunk):
        """For more experts than slots, a few of them at a time."""
        wanted = sorted(set(routes.tolist()))
        out = torch.zeros_like(x)
        for i in range(0, len(wanted), chunk):
            pinned = []
            try:
                for e in wanted[i : i + chunk]:
                    pinned.append(self.pin(e))  # clean: near miss, NoSlot ends in finally, which unpins what is in the list
                for r in pinned:
                    mask = routes == r.expert
                    out[mask] = kernel(x[mask], self.bank.tensors, r.slot)
            finally:
                for r in pinned:
                    self.unpin(r)
        return out

    def norm(self, expert):
        r = self.pin(expert)  # clean: unpinned in finally
        try:
            return float(self.bank.tensors[r.slot].float().norm())
        finally:
            self.unpin(r)

    def hold(self, expert):
        r = self.pin(expert)  # clean: near miss, the function that is returned unpins, exactly once
        return functools.partial(self._release_once, [r])

    def _release_once(self, cell):
        if cell:
            self.unpin(cell.pop())

    def drop_all(self):
        for expert, r in list(self.resident.items()):
            if r.pins:
                L.warning("expert %d is pinned %d times", expert, r.pins)
                continue
            del self.resident[expert]
            self.bank.back(r.slot)


def lend_slot(donor, receiver):
    """Moves an idle slot from a quiet layer to a busy one."""
    slot = donor.take()  # leak: a receiver at its limit is found only after the slot has left the donor
    if slot is None:
        return False
    with receiver.lock:
        if len(receiver.tensors) >= 2 * receiver.capacity:
            return False
        receiver.tensors.append(donor.tensors[slot])
        receiver.idle.append(len(receiver.tensors) - 1)
    return True


def shared_expert(cache, experts, kernel, x):
    """Runs experts that every token goes through, the first ones that can be had."""
    total = None
    for e in experts:
        try:
            r = cache.pin(e)  # clean: unpinned at the end of the turn, not pinned when it raises
        except (NoSlot, LoadError) as exc:
            L.info("shared expert %d: %s", e, exc)
            continue
        y = kernel(x, cache.bank.tensors, r.slot)
        total = y if total is None else total + y
        cache.unpin(r)
    return total


def build(root, layers, slots, shape, pool):
    files = ExpertFiles(root)
    caches = []
    for layer in layers:
        files.open_layer(layer)
        tensors = [torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(slots)]
        caches.append(LayerCache(SlotBank(layer, tensors), files, pool))
    return files, caches
