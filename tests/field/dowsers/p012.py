"""LoRA adapter slots: heap of free ids, quota for each tenant."""
import heapq
from collections import Counter


class AdapterSlots:
    def __init__(self, count, per_tenant):
        self._heap = list(range(count))
        self._quota = per_tenant
        self._owned = Counter()
        self._tenant_of = {}

    def assign(self, tenant):
        if self._owned[tenant] >= self._quota or not self._heap:
            return None
        slot = heapq.heappop(self._heap)
        self._owned[tenant] += 1
        self._tenant_of[slot] = tenant
        return slot

    def unassign(self, slot):
        tenant = self._tenant_of.pop(slot)
        self._owned[tenant] -= 1
        heapq.heappush(self._heap, slot)


class LoraServer:
    def __init__(self, slots: AdapterSlots, gpu):
        self.slots = slots
        self.gpu = gpu
        self.loaded = {}

    def load(self, tenant, name, path):
        slot = self.slots.assign(tenant)  # leak: unreadable weights, returns False with the slot assigned
        if slot is None:
            return False
        weights = self.gpu.read(path)
        if weights is None:
            return False
        self.gpu.upload(slot, weights)
        self.loaded[name] = slot
        return True

    def unload(self, name):
        self.slots.unassign(self.loaded.pop(name))

    def validate(self, tenant, weights):
        slot = self.slots.assign(tenant)  # clean: finally
        if slot is None:
            return None
        try:
            self.gpu.upload(slot, weights)
            return self.gpu.self_test(slot)
        finally:
            self.slots.unassign(slot)

    def reload(self, tenant, name, weights):
        slot = self.slots.assign(tenant)  # clean: stored in loaded, unload() gives it up
        if slot is not None:
            self.gpu.upload(slot, weights)
            if name in self.loaded:
                self.unload(name)
            self.loaded[name] = slot

    def has_room(self, tenant):
        return self.slots.assign(tenant) is not None  # leak: used as a test, the slot is lost
