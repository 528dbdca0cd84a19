"""Feeds decoded samples to the trainer through slots of one shared-memory segment."""
import contextlib
import logging
import struct
import threading
from multiprocessing import shared_memory

log = logging.getLogger(__name__)

HEAD = struct.Struct("<IIQ")


class SlotMap:
    """n equal slots; bit i of `bits` is set while slot i is out."""

    def __init__(self, name, n, slot_bytes):
        self.n = n
        self.slot_bytes = slot_bytes
        self.bits = 0
        self.lock = threading.Lock()
        self.shm = shared_memory.SharedMemory(name, create=True, size=n * slot_bytes)  # clean: closed and unlinked by destroy()

    def seize(self):
        with self.lock:
            for i in range(self.n):
                if not self.bits >> i & 1:
                    self.bits |= 1 << i
                    return i
        return -1

    def seize_pair(self):
        a = self.seize()  # clean: dropped when there is no second one
        if a < 0:
            return None
        b = self.seize()  # clean: returned to the caller
        if b < 0:
            self.drop(a)
            return None
        return a, b

    def seize_adjacent(self):
        """Two neighbouring slots, for samples over slot_bytes."""
        a = self.seize()  # leak: not dropped when the second one is no neighbour
        if a < 0:
            return None
        b = self.seize()  # clean: returned, or dropped when it is no neighbour
        if b < 0:
            self.drop(a)
            return None
        if b != a + 1:
            self.drop(b)
            return None
        return a, b

    def drop(self, i):
        with self.lock:
            self.bits &= ~(1 << i)

    def view(self, i):
        lo = i * self.slot_bytes
        return self.shm.buf[lo:lo + self.slot_bytes]

    @contextlib.contextmanager
    def slot_if_any(self):
        i = self.seize()  # leak: the drop after the yield is skipped when the body raises StopFeed
        if i < 0:
            yield None
            return
        try:
            yield i
        except StopFeed:
            log.info("feed stopped in slot %d", i)
            return
        self.drop(i)

    def destroy(self):
        self.shm.close()
        self.shm.unlink()


class StopFeed(Exception):
    pass


class Feeder:
    def __init__(self, slots: SlotMap, decoder):
        self.slots = slots
        self.decoder = decoder
        self.ready = []
        self.by_worker = {}

    def feed(self, raw):
        i = self.slots.seize()  # leak: an undecodable sample returns with the slot set
        if i < 0:
            return False
        sample = self.decoder.decode(raw)
        if sample is None:
            log.warning("undecodable sample of %d bytes", len(raw))
            return False
        HEAD.pack_into(self.slots.view(i), 0, len(sample), 0, hash(raw) & 0xFFFFFFFF)
        self.ready.append(i)
        return True

    def feed_all(self, raws):
        sent = 0
        for raw in raws:
            sample = self.decoder.decode(raw)
            if sample is None:
                continue
            i = self.slots.seize()  # clean: taken after the continue and moved into ready
            if i < 0:
                break
            HEAD.pack_into(self.slots.view(i), 0, len(sample), 0, 0)
            self.ready.append(i)
            sent += 1
        return sent

    def feed_stereo(self, left, right):
        pair = self.slots.seize_pair()  # leak: only the left slot is dropped when right is silent
        if pair is None:
            return False
        a, b = pair
        pcm_l, pcm_r = self.decoder.decode(left), self.decoder.decode(right)
        if not pcm_r:
            self.slots.drop(a)
            return False
        self.slots.view(a)[:len(pcm_l)] = pcm_l
        self.slots.view(b)[:len(pcm_r)] = pcm_r
        self.ready.extend(pair)
        return True

    def drain(self):
        """Yields the bytes of each ready slot; the slot is free again when the consumer comes back."""
        while self.ready:
            i = self.ready.pop(0)
            try:
                n, _, _ = HEAD.unpack_from(self.slots.view(i))
                yield bytes(self.slots.view(i)[HEAD.size:HEAD.size + n])
            finally:
                self.slots.drop(i)

    def trickle(self, raws):
        with self.slots.slot_if_any() as i:  # leak: StopFeed is swallowed with the slot still set
            if i is None:
                return 0
            n = 0
            for raw in raws:
                if not raw:
                    raise StopFeed
                self.slots.view(i)[:len(raw)] = raw
                n += 1
            return n

    def scratch_views(self, count):
        held = []
        try:
            for _ in range(count):
                i = self.slots.seize()  # clean: near miss, held list dropped in finally when the generator ends
                if i < 0:
                    return
                held.append(i)
                yield self.slots.view(i)
        finally:
            for i in held:
                self.slots.drop(i)

    def rolling_views(self, raws):
        """One slot at a time, the older one returned as the next is filled."""
        last = -1
        for raw in raws:
            i = self.slots.seize()  # leak: the last one is not dropped at the end of the generator
            if i < 0:
                break
            self.slots.view(i)[:len(raw)] = raw
            if last >= 0:
                self.slots.drop(last)
            last = i
            yield self.slots.view(i)

    def assign(self, worker):
        if worker in self.by_worker:
            return self.by_worker[worker]
        i = self.slots.seize()  # clean: by_worker keeps it until retire()
        if i >= 0:
            self.by_worker[worker] = i
        return i

    def reassign(self, worker):
        fresh = self.slots.seize()  # clean: near miss, swapped with the old one, which is dropped
        if fresh < 0:
            return False
        old = self.by_worker.get(worker)
        self.by_worker[worker] = fresh
        if old is not None:
            self.slots.drop(old)
        return True

    def retire(self, worker):
        i = self.by_worker.pop(worker, -1)
        if i >= 0:
            self.slots.drop(i)


def segment_size(name):
    seg = shared_memory.SharedMemory(name)  # leak: mapping never closed
    return seg.size
