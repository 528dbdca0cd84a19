"""LoRA adapter slots: a fixed number of adapters are resident at a time."""
from __future__ import annotations

import threading


class AdapterSlot:
    def __init__(self, index):
        self.index = index
        self.name = None
        self.users = 0


class SlotTable:
    def __init__(self, n):
        self._open = [AdapterSlot(i) for i in range(n)]
        self._lock = threading.Lock()

    def reserve(self, name):
        with self._lock:
            if not self._open:
                return None
            slot = self._open.pop(0)  # clean: goes to the caller
            slot.name = name
            return slot

    def unreserve(self, slot):
        with self._lock:
            slot.name = None
            slot.users = 0
            self._open.append(slot)


class AdapterHandle:
    """Owner of one slot; close() gives it back, once."""

    def __init__(self, table, slot):
        self.table = table
        self.slot = slot

    def close(self):
        if self.slot is not None:
            self.table.unreserve(self.slot)
            self.slot = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
        return False


class AdapterRegistry:
    def __init__(self, table, store):
        self.table = table
        self.store = store
        self.by_name = {}
        self.handles = []

    def register(self, name):
        slot = self.table.reserve(name)  # leak: registering a name again overwrites its slot
        if slot is None:
            return False
        self.by_name[name] = slot
        return True

    def reload(self, name):
        slot = self.table.reserve(name)  # leak: a missing checkpoint returns before the swap
        if slot is None:
            return False
        weights = self.store.get(name)
        if weights is None:
            return False
        old = self.by_name.pop(name, None)
        if old is not None:
            self.table.unreserve(old)
        self.by_name[name] = slot
        return True

    def reload_checked(self, name):
        weights = self.store.get(name)
        if weights is None:
            return False
        slot = self.table.reserve(name)  # clean: near miss, the checkpoint was looked up beforehand and the old slot goes back
        if slot is None:
            return False
        old = self.by_name.pop(name, None)
        if old is not None:
            self.table.unreserve(old)
        self.by_name[name] = slot
        return True

    def unregister(self, name):
        slot = self.by_name.pop(name, None)
        if slot is None:
            return False
        self.table.unreserve(slot)
        return True

    def open_handle(self, name):
        slot = self.table.reserve(name)  # clean: the handle owns the slot from here
        if slot is None:
            return None
        return AdapterHandle(self.table, slot)

    def keep_open(self, name):
        handle = self.open_handle(name)  # clean: near miss, kept in self.handles, shutdown closes each
        if handle is None:
            return False
        self.handles.append(handle)
        return True

    def shutdown(self):
        for name in list(self.by_name):
            self.unregister(name)
        for handle in self.handles:
            handle.close()
        self.handles.clear()


class LoraBatcher:
    def __init__(self, registry):
        self.registry = registry

    def apply(self, name, xs):
        handle = self.registry.open_handle(name)  # leak: the no-weights return leaves the handle open
        if handle is None:
            return xs
        weights = self.registry.store.get(name)
        if not weights:
            return xs
        out = [x * w for x, w in zip(xs, weights)]
        handle.close()
        return out

    def apply_scoped(self, name, xs):
        handle = self.registry.open_handle(name)  # clean: near miss, the with closes it on both returns
        if handle is None:
            return xs
        with handle:
            weights = self.registry.store.get(name)
            if not weights:
                return xs
            return [x * w for x, w in zip(xs, weights)]

    def plan(self, names):
        plan = {}
        for name in names:
            handle = self.registry.open_handle(name)  # leak: duplicate names replace a handle still open in the plan
            if handle is None:
                break
            plan[name] = handle
        order = sorted(plan)
        for handle in plan.values():
            handle.close()
        return order

    def plan_unique(self, names):
        plan = {}
        for name in names:
            if name in plan:
                continue
            handle = self.registry.open_handle(name)  # clean: one handle a name, the loop below closes all
            if handle is None:
                break
            plan[name] = handle
        order = sorted(plan)
        for handle in plan.values():
            handle.close()
        return order


def merge_adapters(table, names):
    base = table.reserve("merged")  # leak: when a source is refused only the source list is unwound
    if base is None:
        return None
    sources = []
    for name in names:
        slot = table.reserve(name)  # clean: both ways out of the function unreserve the sources
        if slot is None:
            for s in sources:
                table.unreserve(s)
            return None
        sources.append(slot)
    base.users = len(sources)
    for s in sources:
        table.unreserve(s)
    return base
