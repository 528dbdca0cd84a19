"""Offloading of MoE experts: a buddy heap in pinned host memory, weight slots on the device."""
import collections
import concurrent.futures as cf
import logging
import threading

import torch

log = logging.getLogger("experts")

MIN_ORDER = 12


class HeapFull(MemoryError):
    pass


class BuddyHeap:
    """Power-of-two blocks. Merging is left to compact(), which runs between steps."""

    def __init__(self, order):
        self.order = order
        self.memory = torch.empty(1 << order, dtype=torch.uint8, pin_memory=True)
        self.bins = collections.defaultdict(list)
        self.bins[order].append(0)
        self.sizes = {}

    def alloc(self, nbytes):
        want = max(MIN_ORDER, (nbytes - 1).bit_length())
        have = want
        while have <= self.order and not self.bins[have]:
            have += 1
        if have > self.order:
            raise HeapFull(nbytes)
        offset = self.bins[have].pop()  # clean: near miss, the upper halves go to the smaller bins and the rest is returned
        while have > want:
            have -= 1
            self.bins[have].append(offset + (1 << have))
        self.sizes[offset] = want
        return offset

    def free(self, offset):
        self.bins[self.sizes.pop(offset)].append(offset)

    def compact(self):
        for order in range(MIN_ORDER, self.order):
            present = set(self.bins[order])
            for offset in sorted(present):
                buddy = offset ^ (1 << order)
                if offset in present and buddy in present:
                    present -= {offset, buddy}
                    self.bins[order + 1].append(min(offset, buddy))
            self.bins[order] = list(present)

    def bytes_at(self, offset, nbytes):
        return self.memory[offset:offset + nbytes]


class DeviceSlots:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self.data = torch.empty(count, nbytes, dtype=torch.uint8, device="cuda")
        self._free = list(range(count))
        self._cond = threading.Condition()

    def take(self):
        with self._cond:
            while not self._free:
                self._cond.wait()
            return self._free.pop()  # clean: returned to the caller

    def take_now(self):
        with self._cond:
            return self._free.pop() if self._free else None  # clean: returned to the caller

    def put(self, slot):
        with self._cond:
            self._free.append(slot)
            self._cond.notify()


class ExpertStore:
    def __init__(self, heap, slots, nbytes, workers=2):
        self.heap = heap
        self.slots = slots
        self.nbytes = nbytes
        self.host = {}                             # key -> heap offset
        self.resident = collections.OrderedDict()  # key -> device slot
        self.loading = {}                          # key -> future of a slot
        self.replicas = {}                         # key -> device slots
        self.dirty = set()
        self.pool = cf.ThreadPoolExecutor(workers, "experts")

    # host side

    def store(self, key, weights):
        flat = weights.contiguous().view(torch.uint8).view(-1)
        offset = self.heap.alloc(flat.numel())  # clean: near miss, in the table, and the block of the key before is freed
        self.heap.bytes_at(offset, flat.numel()).copy_(flat)
        old = self.host.pop(key, None)
        self.host[key] = offset
        if old is not None:
            self.heap.free(old)

    def store_all(self, weights):
        """Number of experts that found room."""
        count = 0
        try:
            for key, tensor in weights.items():
                self.store(key, tensor)
                count += 1
        except HeapFull:
            log.warning("%d of %d experts in host memory", count, len(weights))
        return count

    def shrink(self, key):
        """Replace the host copy of an expert by one in 8 bits."""
        work = self.heap.alloc(self.nbytes)  # leak: the second alloc raises HeapFull, which shrink_all() swallows
        wide = self.heap.bytes_at(work, self.nbytes)
        wide.copy_(self.heap.bytes_at(self.host[key], self.nbytes))
        small = self.heap.alloc(self.nbytes // 2)  # clean: replaces the entry of the key, whose block is freed
        values = wide.view(torch.bfloat16)
        scale = values.abs().max() / 127
        self.heap.bytes_at(small, values.numel()).view(torch.int8).copy_((values / scale).round())
        self.heap.free(work)
        self.heap.free(self.host[key])
        self.host[key] = small
        return float(scale)

    def shrink_all(self):
        scales = {}
        for key in list(self.host):
            try:
                scales[key] = self.shrink(key)
            except HeapFull:
                log.info("no room to shrink %s", key)
        return scales

    def store_stream(self, key, chunks):
        """An expert of unknown size; the block is doubled when it is full."""
        size, used = 1 << MIN_ORDER, 0
        offset = self.heap.alloc(size)  # clean: near miss, freed when a larger one takes over, in the end in the table
        for chunk in chunks:
            while used + len(chunk) > size:
                try:
                    larger = self.heap.alloc(size * 2)  # clean: near miss, becomes the block of the next round
                except HeapFull:
                    self.heap.free(offset)
                    return False
                self.heap.bytes_at(larger, used).copy_(self.heap.bytes_at(offset, used))
                self.heap.free(offset)
                offset, size = larger, size * 2
            self.heap.bytes_at(offset + used, len(chunk)).copy_(chunk)
            used += len(chunk)
        if key in self.host:
            self.heap.free(self.host[key])
        self.host[key] = offset
        return True

    # device side

    def _copy_in(self, key, slot):
        self.slots.data[slot].copy_(self.heap.bytes_at(self.host[key], self.nbytes), non_blocking=True)

    def fetch(self, key):
        if key in self.resident:
            self.resident.move_to_end(key)
            return self.slots.data[self.resident[key]]
        if key in self.loading:
            slot = self.loading.pop(key).result()
        else:
            slot = self.slots.take_now()  # leak: evict() takes a dirty expert from the table and returns on HeapFull
            while slot is None:
                if not self.evict():
                    raise HeapFull("nothing to evict for %s" % (key,))
                slot = self.slots.take_now()  # leak: the same path in evict() loses it later
            self._copy_in(key, slot)
        self.resident[key] = slot
        return self.slots.data[slot]

    def evict(self):
        if not self.resident:
            return False
        key, slot = self.resident.popitem(last=False)
        if key in self.dirty:
            try:
                self.store(key, self.slots.data[slot])
            except HeapFull:
                log.error("%s cannot be written back", key)
                return False
            self.dirty.discard(key)
        self.slots.put(slot)
        return True

    def touch(self, key):
        self.dirty.add(key)

    def prefetch(self, keys):
        for key in keys:
            if key not in self.resident and key not in self.loading:
                self.loading[key] = self.pool.submit(self._load, key)

    def _load(self, key):
        slot = self.slots.take()  # leak: forget_prefetched() clears the futures together with the slots in them
        self._copy_in(key, slot)
        return slot

    def forget_prefetched(self):
        """The router changed its mind."""
        for future in self.loading.values():
            future.cancel()
        self.loading.clear()

    def replicate(self, key, count):
        """Copies of a hot expert, so that its tokens can be spread over streams."""
        if key in self.replicas:
            return len(self.replicas[key])
        copies = []
        while len(copies) < count:
            slot = self.slots.take_now()  # leak: drop_replicas() starts at the second copy
            if slot is None:
                break
            self._copy_in(key, slot)
            copies.append(slot)
        self.replicas[key] = copies
        return len(copies)

    def drop_replicas(self, key):
        for slot in self.replicas.pop(key, [])[1:]:
            self.slots.put(slot)

    def verify(self, key):
        """True when the device gives back what the host holds."""
        slot = self.slots.take_now()  # clean: the early returns come before the take or after the put
        if slot is None:
            return None
        self._copy_in(key, slot)
        equal = torch.equal(self.slots.data[slot].cpu(), self.heap.bytes_at(self.host[key], self.nbytes))
        self.slots.put(slot)
        if not equal:
            log.error("%s differs", key)
            return False
        return True

    def close(self):
        self.pool.shutdown()
        for future in self.loading.values():
            self.slots.put(future.result())
        self.loading.clear()
        while self.evict():
            pass
