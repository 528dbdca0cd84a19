"""Slots of the LoRA adapter bank on the device."""
import threading
import time


class AdapterSlots:
    """A table of slots; claim() gives an index, or -1 when the table is full."""

    def __init__(self, size):
        self._owner = [None] * size
        self._lock = threading.Lock()

    def claim(self, name):
        with self._lock:
            for index, owner in enumerate(self._owner):
                if owner is None:
                    self._owner[index] = name
                    return index
        return -1

    def vacate(self, index):
        with self._lock:
            self._owner[index] = None


class BankFull(RuntimeError):
    pass


def merge_once(slots, bank, weights, base):
    slot = slots.claim("merge")  # leak: slot 0 is falsy and passes the test in the finally
    if slot == -1:
        raise BankFull()
    try:
        bank.write(slot, weights)
        return bank.merge(slot, base)
    finally:
        if slot:
            slots.vacate(slot)


def probe_adapter(slots, bank, weights, prompt):
    slot = slots.claim("probe")  # clean: the first return stands for a full table, all else passes the finally
    if slot < 0:
        return None
    try:
        bank.write(slot, weights)
        return bank.generate(slot, prompt)
    finally:
        slots.vacate(slot)


class AdapterManager:
    def __init__(self, slots, bank):
        self.slots = slots
        self.bank = bank
        self.loaded = {}

    def load(self, name, weights):
        if name in self.loaded:
            return self.loaded[name]
        slot = self.slots.claim(name)  # leak: unload_all() clears the dict and vacates nothing
        if slot == -1:
            raise BankFull(name)
        self.loaded[name] = slot
        self.bank.write(slot, weights)
        return slot

    def unload(self, name):
        self.slots.vacate(self.loaded.pop(name))

    def unload_all(self):
        self.bank.zero()
        self.loaded.clear()


class HotReloader:
    def __init__(self, slots, bank):
        self.slots = slots
        self.bank = bank
        self.current = {}

    def reload(self, name, weights):
        slot = self.slots.claim(name)  # leak: a second reload of the same name overwrites the entry with the slot of the older version
        if slot == -1:
            return False
        self.bank.write(slot, weights)
        self.current[name] = slot
        return True

    def remove(self, name):
        slot = self.current.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)


class ColdReloader:
    def __init__(self, slots, bank):
        self.slots = slots
        self.bank = bank
        self.current = {}

    def reload(self, name, weights):
        self.remove(name)
        slot = self.slots.claim(name)  # clean: remove() above has vacated the older slot, so nothing is overwritten
        if slot == -1:
            return False
        self.current[name] = slot
        self.bank.write(slot, weights)
        return True

    def remove(self, name):
        slot = self.current.pop(name, None)
        if slot is not None:
            self.slots.vacate(slot)


class Router:
    def __init__(self, slots):
        self.slots = slots
        self.by_tenant = {}

    def slot_for(self, tenant):
        slot = self.by_tenant.get(tenant, self.slots.claim(tenant))  # leak: the default is evaluated for a known tenant as well and that slot is thrown away
        if slot == -1:
            raise BankFull(tenant)
        self.by_tenant[tenant] = slot
        return slot

    def evict(self, tenant):
        slot = self.by_tenant.pop(tenant, None)
        if slot is not None:
            self.slots.vacate(slot)


class LazyRouter:
    def __init__(self, slots):
        self.slots = slots
        self.by_tenant = {}

    def slot_for(self, tenant):
        slot = self.by_tenant.get(tenant)
        if slot is None and (slot := self.slots.claim(tenant)) == -1:  # clean: claimed for an unknown tenant only, kept below and vacated by evict()
            raise BankFull(tenant)
        self.by_tenant[tenant] = slot
        return slot

    def evict(self, tenant):
        slot = self.by_tenant.pop(tenant, None)
        if slot is not None:
            self.slots.vacate(slot)


class DraftModel:
    def __init__(self, slots, bank):
        self.slots = slots
        self.bank = bank

    @property
    def slot(self):
        slot = self.slots.claim("draft")  # leak: the property claims a further slot at each access, and unload() vacates the one that it has just claimed
        if slot == -1:
            raise BankFull("draft")
        return slot

    def load(self, weights):
        self.bank.write(self.slot, weights)

    def unload(self):
        self.slots.vacate(self.slot)


class AdapterSession:
    def __init__(self, slots, bank, name, rank):
        self.slots = slots
        self.slot = slots.claim(name)  # leak: the constructor raises on a wrong rank, so serve() has no session that it could close
        if self.slot == -1:
            raise BankFull(name)
        if rank not in bank.ranks:
            raise ValueError(f"rank {rank} not in {bank.ranks}")
        self.bank = bank

    def close(self):
        self.slots.vacate(self.slot)


def serve(slots, bank, name, rank, prompts):
    session = AdapterSession(slots, bank, name, rank)
    try:
        return [bank.generate(session.slot, prompt) for prompt in prompts]
    finally:
        session.close()


class EvalRunner:
    def __init__(self, slots, bus):
        self.slots = slots
        self.bus = bus
        self.held = None

    def _on_done(self, event):
        self.slots.vacate(self.held)
        self.held = None
        self.bus.unsubscribe("done", self._on_done)

    def run(self, engine, weights):
        if self.held is not None:
            return
        slot = self.slots.claim("eval")  # leak: the handler that vacates is taken off the bus before done is published, and held is reset
        if slot == -1:
            raise BankFull("eval")
        self.held = slot
        self.bus.subscribe("done", self._on_done)
        result = engine.evaluate(slot, weights)
        self.bus.unsubscribe("done", self._on_done)
        self.held = None
        self.bus.publish("done", result)


class ExpiringAdapters:
    def __init__(self, slots, ttl):
        self.slots = slots
        self.ttl = ttl
        self.live = {}

    def touch(self, name):
        self._expire(time.monotonic())
        if name in self.live:
            slot = self.live[name][0]
        else:
            slot = self.slots.claim(name)  # leak: _expire() deletes entries that are too old together with the slot in them
            if slot == -1:
                raise BankFull(name)
        self.live[name] = (slot, time.monotonic() + self.ttl)
        return slot

    def _expire(self, now):
        for name in [n for n, (_, until) in self.live.items() if until < now]:
            del self.live[name]

    def close(self):
        for slot, _ in self.live.values():
            self.slots.vacate(slot)
        self.live.clear()


class AdapterSet:
    def __init__(self, slots, bank):
        self.slots = slots
        self.bank = bank
        self.active = {}

    def add(self, name, weights):
        if name in self.active:
            raise KeyError(name)
        slot = self.slots.claim(name)  # clean: reset() replaces the dict, and walks the old one afterwards
        if slot == -1:
            raise BankFull(name)
        self.active[name] = slot
        self.bank.write(slot, weights)

    def reset(self):
        previous, self.active = self.active, {}
        self.bank.zero()
        for slot in previous.values():
            self.slots.vacate(slot)
