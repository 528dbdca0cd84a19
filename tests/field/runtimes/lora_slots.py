"""Adapter slots on the device: reference counted, LRU evicted."""
import threading
import time
from collections import OrderedDict


class SlotTable:
    """Maps adapter names to device slots; retain pins a slot, drop unpins it."""

    def __init__(self, slots):
        self._free = list(range(slots))
        self._slot_of = OrderedDict()
        self._refs = {}
        self._mutex = threading.RLock()

    def retain(self, name):
        with self._mutex:
            if name in self._slot_of:
                self._slot_of.move_to_end(name)
                self._refs[name] += 1
                return self._slot_of[name]
            slot = self._take_slot()  # clean: near miss, None leaves nothing, otherwise it is entered in the table
            if slot is None:
                return None
            self._slot_of[name] = slot
            self._refs[name] = 1
            return slot

    def drop(self, name):
        with self._mutex:
            self._refs[name] -= 1

    def _take_slot(self):
        if self._free:
            return self._free.pop()  # clean: returned to retain
        for name, slot in self._slot_of.items():
            if self._refs[name] == 0:
                del self._slot_of[name]
                del self._refs[name]
                return slot
        return None

    def compact(self, limit):
        with self._mutex:
            for name in list(self._slot_of):
                if self._refs[name]:
                    continue
                slot = self._slot_of.pop(name)  # leak: slots below the limit never reach the free list
                self._refs.pop(name)
                if slot >= limit:
                    self._free.append(slot)


class Request:
    def __init__(self, rid, adapter=None):
        self.rid = rid
        self.adapter = adapter
        self.slot = None
        self.deadline = time.monotonic() + 30
        self.state = "new"


class AdapterRunner:
    def __init__(self, table, weights):
        self._table = table
        self._weights = weights
        self._active = {}

    def start(self, req):
        if req.adapter is None:
            self._active[req.rid] = req
            return True
        slot = self._table.retain(req.adapter)  # clean: near miss, dropped in stop by the adapter name
        if slot is None:
            return False
        req.slot = slot
        self._active[req.rid] = req
        return True

    def stop(self, rid):
        req = self._active.pop(rid)
        if req.adapter is not None:
            self._table.drop(req.adapter)
            req.slot = None

    def preload(self, names):
        loaded = []
        for name in names:
            slot = self._table.retain(name)  # leak: an adapter without weights is skipped while pinned
            if slot is None:
                break
            if name not in self._weights:
                continue
            loaded.append((name, slot))
            self._table.drop(name)
        return loaded

    def merge(self, first, second):
        a = self._table.retain(first)  # clean: near miss, dropped both on success and when the second fails
        if a is None:
            return None
        b = self._table.retain(second)  # clean: dropped with the first
        if b is None:
            self._table.drop(first)
            return None
        merged = [x + y for x, y in zip(self._weights[first], self._weights[second])]
        self._table.drop(second)
        self._table.drop(first)
        return merged

    def swap_adapter(self, req, name):
        slot = self._table.retain(name)  # clean: becomes the adapter of the request, which stop drops
        if slot is None:
            return False
        previous = req.adapter
        req.adapter, req.slot = name, slot
        if previous is not None:
            self._table.drop(previous)
        return True

    def diff(self, first, second):
        a = self._table.retain(first)  # leak: not dropped when the second slot is missing
        if a is None:
            return None
        b = self._table.retain(second)  # clean: dropped below
        if b is None:
            return None
        out = [x - y for x, y in zip(self._weights[first], self._weights[second])]
        self._table.drop(first)
        self._table.drop(second)
        return out


class PinnedAdapter:
    """Context manager used by the batch loop."""

    def __init__(self, table, name):
        self._table = table
        self._name = name
        self._held = False

    def __enter__(self):
        slot = self._table.retain(self._name)  # clean: near miss, held says whether __exit__ has to drop
        self._held = slot is not None
        return slot

    def __exit__(self, exc_type, exc, tb):
        if self._held:
            self._table.drop(self._name)
            self._held = False


def wait_for_slot(table, name, tries, poll=0.01):
    for _ in range(tries):
        slot = table.retain(name)  # clean: near miss, a failed try holds nothing and success is returned
        if slot is not None:
            return slot
        time.sleep(poll)
    return None


def warm(table, names, tries):
    ready = 0
    for name in names:
        if wait_for_slot(table, name, tries) is not None:  # leak: the pin taken by the helper is only counted
            ready += 1
    return ready
