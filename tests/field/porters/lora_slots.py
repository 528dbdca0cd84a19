"""Placement of LoRA adapters into the fixed slots of the fused kernels."""
from __future__ import annotations

import collections
import logging

log = logging.getLogger(__name__)


class AdapterSlots:
    def __init__(self, count):
        self._free = set(range(count))

    def acquire(self):
        if not self._free:
            return None
        return self._free.pop()

    def release(self, slot):
        self._free.add(slot)


class AdapterLoader:
    def __init__(self, slots, store, kernel):
        self.slots = slots
        self.store = store
        self.kernel = kernel
        self.by_name = {}

    async def load(self, name):
        if name in self.by_name:
            return self.by_name[name]
        slot = self.slots.acquire()  # leak: weights that cannot be read are logged and None is returned
        if slot is None:
            return None
        try:
            weights = await self.store.read(name)
        except OSError as exc:
            log.warning("adapter %s: %s", name, exc)
            return None
        self.kernel.upload(slot, weights)
        self.by_name[name] = slot
        return slot

    def unload(self, name):
        slot = self.by_name.pop(name, None)
        if slot is not None:
            self.slots.release(slot)


class SharedAdapters:
    """One slot per adapter name, kept while some request uses it."""

    def __init__(self, slots):
        self.slots = slots
        self.slot_of = {}
        self.users = collections.Counter()

    def enter(self, name):
        if not self.users[name]:
            slot = self.slots.acquire()  # clean: near miss, taken by the first user and released by the last
            if slot is None:
                return None
            self.slot_of[name] = slot
        self.users[name] += 1
        return self.slot_of[name]

    def leave(self, name):
        self.users[name] -= 1
        if not self.users[name]:
            self.slots.release(self.slot_of.pop(name))
            del self.users[name]


class AdapterRequests:
    def __init__(self, slots):
        self.slots = slots
        self.slot_of = {}
        self.active = collections.defaultdict(set)
        self.adapter_of = {}

    def start(self, rid, name):
        if name not in self.slot_of:
            slot = self.slots.acquire()  # leak: an aborted request stays in the active set, which then never empties
            if slot is None:
                return False
            self.slot_of[name] = slot
        self.active[name].add(rid)
        self.adapter_of[rid] = name
        return True

    def finish(self, rid):
        name = self.adapter_of.pop(rid)
        self.active[name].discard(rid)
        if not self.active[name]:
            del self.active[name]
            self.slots.release(self.slot_of.pop(name))

    def abort(self, rid):
        self.adapter_of.pop(rid, None)


class LruAdapters:
    def __init__(self, slots, limit):
        self.slots = slots
        self.limit = limit
        self.order = collections.OrderedDict()

    def use(self, name):
        if name in self.order:
            self.order.move_to_end(name)
            return self.order[name]
        if len(self.order) >= self.limit:
            _, victim = self.order.popitem(last=False)
            self.slots.release(victim)
        slot = self.slots.acquire()  # clean: near miss, new key only and the evicted slot is released
        if slot is not None:
            self.order[name] = slot
        return slot


class ReloadingAdapters:
    def __init__(self, slots, kernel):
        self.slots = slots
        self.kernel = kernel
        self.current = {}

    def publish(self, name, weights):
        slot = self.slots.acquire()  # clean: near miss, the slot that it replaces is released below
        if slot is None:
            return False
        self.kernel.upload(slot, weights)
        old = self.current.get(name)
        self.current[name] = slot
        if old is not None:
            self.slots.release(old)
        return True


class VersionedAdapters:
    def __init__(self, slots, kernel):
        self.slots = slots
        self.kernel = kernel
        self.current = {}

    def publish(self, name, version, weights):
        known = self.current.get(name)
        if known is not None and known[0] == version:
            return True
        slot = self.slots.acquire()  # leak: a newer version overwrites the entry of the older one
        if slot is None:
            return False
        self.kernel.upload(slot, weights)
        self.current[name] = (version, slot)
        return True

    def retire(self, name):
        _, slot = self.current.pop(name)
        self.slots.release(slot)


class BatchPinner:
    def __init__(self, slots):
        self.slots = slots
        self.pinned = []

    def pin(self, names):
        pinned = []
        for name in names:
            slot = self.slots.acquire()  # leak: running out in the middle returns and drops the local list
            if slot is None:
                return False
            pinned.append((name, slot))
        self.unpin()
        self.pinned = pinned
        return True

    def unpin(self):
        for _, slot in self.pinned:
            self.slots.release(slot)
        self.pinned = []


class TenantAdapters:
    def __init__(self, slots):
        self.slots = slots
        self.active = {}
        self.parked = {}

    def add(self, tenant, name):
        if name in self.active.get(tenant, {}) or name in self.parked.get(tenant, {}):
            return True
        slot = self.slots.acquire()  # leak: removing a tenant releases the active table, the parked one is dropped
        if slot is None:
            return False
        self.active.setdefault(tenant, {})[name] = slot
        return True

    def park(self, tenant, name):
        self.parked.setdefault(tenant, {})[name] = self.active[tenant].pop(name)

    def remove_tenant(self, tenant):
        for slot in self.active.pop(tenant, {}).values():
            self.slots.release(slot)
        self.parked.pop(tenant, None)


def build_base_adapters(slots, kernel, base_weights):
    """Start-up: the adapters that every deployment carries."""
    table = {}
    for name, weights in base_weights.items():
        table[name] = slots.acquire()  # clean: taken once at start-up for the life of the process
        kernel.upload(table[name], weights)
    return table
