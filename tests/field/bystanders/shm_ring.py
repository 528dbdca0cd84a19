# Shared memory message ring between the API process and the engine process.
import pickle
import struct
import time

HEADER = struct.Struct("<II")


class RingFull(Exception):
    pass


class SlotRing:
    def __init__(self, nslots, slot_size):
        self.slot_size = slot_size
        self.mem = bytearray(nslots * slot_size)
        self.free = list(range(nslots))
        self.ready = []

    def claim_slot(self):
        if not self.free:
            raise RingFull()
        return self.free.pop(0)

    def free_slot(self, i):
        self.free.append(i)

    def commit(self, i):
        self.ready.append(i)

    def pop_ready(self):
        """The reader owns the slot afterwards and frees it."""
        return self.ready.pop(0) if self.ready else None

    def view(self, i):
        return memoryview(self.mem)[i * self.slot_size:(i + 1) * self.slot_size]


class Writer:
    def __init__(self, ring, timeout=5.0):
        self.ring = ring
        self.timeout = timeout

    def _claim_wait(self):
        end = time.monotonic() + self.timeout
        while True:
            try:
                return self.ring.claim_slot()  # clean: returned as soon as there is one
            except RingFull:
                if time.monotonic() > end:
                    return None
                time.sleep(0.001)

    def write(self, obj):
        data = pickle.dumps(obj)
        slot = self._claim_wait()  # leak: oversized data return False with the slot claimed
        if slot is None:
            return False
        if len(data) + HEADER.size > self.ring.slot_size:
            return False
        v = self.ring.view(slot)
        HEADER.pack_into(v, 0, len(data), 0)
        v[HEADER.size:HEADER.size + len(data)] = data
        self.ring.commit(slot)
        return True

    def write_bytes(self, data, kind):
        if len(data) + HEADER.size > self.ring.slot_size:
            raise ValueError("message too large")
        slot = self._claim_wait()  # clean: near miss, commit passes it to the reader
        if slot is None:
            raise TimeoutError("reader is stuck")
        v = self.ring.view(slot)
        HEADER.pack_into(v, 0, len(data), kind)
        v[HEADER.size:HEADER.size + len(data)] = data
        self.ring.commit(slot)

    def write_pair(self, a, b):
        """Two slots or nothing."""
        first = self._claim_wait()  # clean: near miss, freed if the second can not be had
        if first is None:
            return False
        second = self._claim_wait()  # clean: committed with the first
        if second is None:
            self.ring.free_slot(first)
            return False
        for slot, data in ((first, a), (second, b)):
            v = self.ring.view(slot)
            HEADER.pack_into(v, 0, len(data), 0)
            v[HEADER.size:HEADER.size + len(data)] = data
            self.ring.commit(slot)
        return True

    def write_triple(self, parts):
        slots = []
        for _ in parts:
            s = self._claim_wait()  # leak: slots claimed before the shortage stay claimed
            if s is None:
                return 0
            slots.append(s)
        for s, data in zip(slots, parts):
            v = self.ring.view(s)
            HEADER.pack_into(v, 0, len(data), 1)
            v[HEADER.size:HEADER.size + len(data)] = data
            self.ring.commit(s)
        return len(slots)


class Reader:
    def __init__(self, ring, handlers=None):
        self.ring = ring
        self.handlers = handlers or {}
        self.bad = 0

    def read(self):
        slot = self.ring.pop_ready()  # clean: freed after the copy
        if slot is None:
            return None
        v = self.ring.view(slot)
        n, _ = HEADER.unpack_from(v, 0)
        data = bytes(v[HEADER.size:HEADER.size + n])
        self.ring.free_slot(slot)
        return pickle.loads(data)

    def dispatch(self):
        done = 0
        while True:
            slot = self.ring.pop_ready()  # leak: a message without handler continues with its slot owned
            if slot is None:
                return done
            v = self.ring.view(slot)
            n, kind = HEADER.unpack_from(v, 0)
            fn = self.handlers.get(kind)
            if fn is None:
                self.bad += 1
                continue
            fn(bytes(v[HEADER.size:HEADER.size + n]))
            self.ring.free_slot(slot)
            done += 1

    def dispatch_guarded(self):
        slot = self.ring.pop_ready()  # clean: near miss, the handler's error is counted and finally frees
        if slot is None:
            return False
        try:
            n, kind = HEADER.unpack_from(self.ring.view(slot), 0)
            self.handlers[kind](bytes(self.ring.view(slot)[HEADER.size:HEADER.size + n]))
        except KeyError:
            self.bad += 1
        finally:
            self.ring.free_slot(slot)
        return True

    def skip(self, n):
        for _ in range(n):
            self.ring.pop_ready()  # leak: discarded, the slots come back never
