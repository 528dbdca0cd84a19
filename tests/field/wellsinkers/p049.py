"""Adapters resident on the device: pinned by name, evicted by last use."""
import time


class AdapterSlots:
    def __init__(self, n, loader):
        self.loader = loader
        self.names = [None] * n
        self.pins = [0] * n
        self.used = [0.0] * n

    def _find(self, name):
        if name in self.names:
            return self.names.index(name)
        idle = [i for i, p in enumerate(self.pins) if p == 0]
        if not idle:
            return -1
        i = min(idle, key=self.used.__getitem__)
        self.loader(name, i)
        self.names[i] = name
        return i

    def hold(self, name):
        i = self._find(name)
        if i >= 0:
            self.pins[i] += 1
            self.used[i] = time.monotonic()
        return i

    def loose(self, i):
        self.pins[i] -= 1


class Scheduler:
    def __init__(self, slots, engine):
        self.slots = slots
        self.engine = engine
        self.running = {}

    def dispatch(self, rid, adapter, prompt):
        slot = self.slots.hold(adapter)  # clean: kept by request, loosed by done
        if slot < 0:
            return False
        self.running[rid] = slot
        self.engine.enqueue(rid, slot, prompt)
        return True

    def done(self, rid):
        self.slots.loose(self.running.pop(rid))

    def classify(self, adapter, text):
        slot = self.slots.hold(adapter)  # leak: cached answers leave the slot held
        if slot < 0:
            return None
        if text in self.engine.cache:
            return self.engine.cache[text]
        label = self.engine.run(slot, text)
        self.slots.loose(slot)
        return label


def evaluate(slots, engine, adapter, texts):
    slot = slots.hold(adapter)  # clean: loosed in finally
    if slot < 0:
        return None
    try:
        return [engine.run(slot, t) for t in texts]
    finally:
        slots.loose(slot)
