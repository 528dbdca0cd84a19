"""LoRA adapter slots: a bitmap of device slots, host weight arenas and in-flight counts.

Slot 0 is the "no adapter" slot and is never handed out.
"""
import logging
import threading
from contextlib import contextmanager

import torch

log = logging.getLogger("serving.lora")

NO_ADAPTER = 0


class SlotBitmap:
    def __init__(self, count):
        self.count = count
        self._bits = 1
        self._mu = threading.Lock()

    def claim(self):
        """Lowest free slot, or -1."""
        with self._mu:
            for i in range(1, self.count):
                if not self._bits >> i & 1:
                    self._bits |= 1 << i
                    return i
        return -1

    def vacate(self, i):
        with self._mu:
            self._bits &= ~(1 << i)

    def used(self):
        return bin(self._bits).count("1") - 1


class HostArena:
    """Pinned staging tensors, one size per rank."""

    def __init__(self, hidden, per_rank=2):
        self.hidden = hidden
        self.per_rank = per_rank
        self._idle = {}
        self._made = {}

    def checkout(self, rank):
        idle = self._idle.setdefault(rank, [])
        if idle:
            return idle.pop()  # clean: returned to the caller
        if self._made.get(rank, 0) >= self.per_rank:
            return None
        self._made[rank] = self._made.get(rank, 0) + 1
        return torch.empty(2, rank, self.hidden).pin_memory()

    def checkin(self, t):
        self._idle[t.shape[1]].append(t)


class Adapter:
    def __init__(self, name, rank, path):
        self.name = name
        self.rank = rank
        self.path = path
        self.slot = None
        self.inflight = 0
        self.pinned = False


class AdapterHost:
    def __init__(self, max_loras, hidden, reader):
        self.slots = SlotBitmap(max_loras + 1)
        self.arena = HostArena(hidden)
        self.weights = torch.zeros(max_loras + 1, 2, 64, hidden)
        self.reader = reader
        self.known = {}
        self._lock = threading.RLock()

    # loading -------------------------------------------------------------

    def _fill(self, adapter, slot):
        stage = self.arena.checkout(adapter.rank)  # leak: not checked in when the reader reports a rank mismatch
        if stage is None:
            return False
        got = self.reader(adapter.path, out=stage)
        if got != adapter.rank:
            log.error("adapter %s: file has rank %s, expected %s", adapter.name, got, adapter.rank)
            return False
        self.weights[slot, :, :adapter.rank].copy_(stage, non_blocking=False)
        self.arena.checkin(stage)
        return True

    def load(self, name, rank, path):
        with self._lock:
            if name in self.known:
                return self.known[name]
            adapter = Adapter(name, rank, path)
            slot = self.slots.claim()  # clean: vacated when filling fails, else held by the adapter
            if slot < 0 and self._evict_one():
                slot = self.slots.claim()  # clean: near miss, only reached when the first claim gave nothing
            if slot < 0:
                return None
            if not self._fill(adapter, slot):
                self.slots.vacate(slot)
                return None
            adapter.slot = slot
            self.known[name] = adapter
            return adapter

    def reload(self, name):
        """Read the adapter's file again, into a new slot, and swap it in."""
        with self._lock:
            adapter = self.known[name]
            slot = self.slots.claim()  # leak: not vacated when the file can not be read again
            if slot < 0:
                return False
            if not self._fill(adapter, slot):
                return False
            old, adapter.slot = adapter.slot, slot
            self.slots.vacate(old)
            return True

    def replace(self, name, path):
        with self._lock:
            adapter = self.known[name]
            slot = self.slots.claim()  # clean: near miss, exactly one of the two slots is vacated
            if slot < 0:
                return False
            adapter.path, old_path = path, adapter.path
            ok = self._fill(adapter, slot)
            if ok:
                adapter.slot, slot = slot, adapter.slot
            else:
                adapter.path = old_path
            self.slots.vacate(slot)
            return ok

    def _evict_one(self):
        for name, adapter in list(self.known.items()):
            if adapter.inflight == 0 and not adapter.pinned:
                del self.known[name]
                self.slots.vacate(adapter.slot)
                return True
        return False

    def unload(self, name):
        with self._lock:
            adapter = self.known.get(name)
            if adapter is None or adapter.inflight:
                return False
            del self.known[name]
            self.slots.vacate(adapter.slot)
            return True

    # use by requests -----------------------------------------------------

    def enter(self, name):
        """Count one more request on the adapter; pairs with leave()."""
        with self._lock:
            adapter = self.known.get(name)
            if adapter is None:
                return None
            adapter.inflight += 1
            return adapter

    def leave(self, adapter):
        with self._lock:
            adapter.inflight -= 1

    @contextmanager
    def using(self, name):
        if not name:
            yield NO_ADAPTER
            return
        adapter = self.enter(name)  # clean: left in finally after the None check
        if adapter is None:
            raise KeyError(name)
        try:
            yield adapter.slot
        finally:
            self.leave(adapter)

    def merge(self, names, into, rank, path):
        """Average several loaded adapters and write them as a new one."""
        parts = []
        for name in names:
            part = self.enter(name)  # leak: parts entered before an unknown name are not left
            if part is None:
                log.warning("cannot merge: %s is not loaded", name)
                return None
            parts.append(part)
        mean = torch.stack([self.weights[p.slot] for p in parts]).mean(0)
        merged = self.load(into, rank, path)
        if merged is not None:
            self.weights[merged.slot].copy_(mean)
        for part in parts:
            self.leave(part)
        return merged

    def norms(self, names):
        out = {}
        for name in names:
            with self.using(name) as slot:  # clean: with statement
                out[name] = float(self.weights[slot].norm())
        return out


class BatchBinder:
    """Keeps the slot index per batch row in step with the scheduler."""

    def __init__(self, host, max_rows):
        self.host = host
        self.rows = [None] * max_rows
        self.index = torch.zeros(max_rows, dtype=torch.long)

    def bind(self, row, name):
        adapter = self.host.enter(name) if name else None  # clean: near miss, stored in rows after the row's old adapter was left
        self.unbind(row)
        self.rows[row] = adapter
        self.index[row] = adapter.slot if adapter is not None else NO_ADAPTER

    def unbind(self, row):
        held, self.rows[row] = self.rows[row], None
        if held is not None:
            self.host.leave(held)
        self.index[row] = NO_ADAPTER

    def move(self, src, dst):
        self.unbind(dst)
        self.rows[dst], self.rows[src] = self.rows[src], None
        self.index[dst], self.index[src] = int(self.index[src]), NO_ADAPTER

    def bind_wave(self, names):
        """Bind rows from 0 up; returns how many rows were bound."""
        done = 0
        for row, name in enumerate(names):
            adapter = self.host.enter(name)  # leak: continue over an occupied row drops the count just taken
            if adapter is None:
                break
            if self.rows[row] is not None:
                continue
            self.rows[row] = adapter
            self.index[row] = adapter.slot
            done += 1
        return done

    def close(self):
        for row in range(len(self.rows)):
            self.unbind(row)


def warm(host, manifest):
    """Load every adapter of the manifest; the count of loads that worked."""
    good = 0
    for entry in manifest:
        stage = host.arena.checkout(entry["rank"])  # clean: checked in before every exit of the iteration
        if stage is None:
            log.info("no staging for rank %d", entry["rank"])
            continue
        header = host.reader(entry["path"], out=stage)
        host.arena.checkin(stage)
        if header != entry["rank"]:
            continue
        if host.load(entry["name"], entry["rank"], entry["path"]):
            good += 1
    return good


def host_checksum(host, rank, path):
    stage = host.arena.checkout(rank)  # leak: the pooled tensor is summed and dropped
    if stage is None:
        return None
    host.reader(path, out=stage)
    return float(stage.double().sum())
