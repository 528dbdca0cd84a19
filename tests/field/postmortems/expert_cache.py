"""Expert weight cache for a mixture-of-experts model whose experts live on the host."""
from __future__ import annotations

from collections import OrderedDict


class ExpertSlot:
    def __init__(self, idx):
        self.idx = idx
        self.expert = None
        self.pins = 0


class ExpertSlots:
    """Device slots; claim_slot()/return_slot()."""

    def __init__(self, n):
        self._vacant = [ExpertSlot(i) for i in range(n)]

    def claim_slot(self):
        if self._vacant:
            return self._vacant.pop()  # clean: handed to the caller
        return None

    def return_slot(self, slot):
        slot.expert = None
        self._vacant.append(slot)

    def has_vacant(self):
        return bool(self._vacant)


class WeightLoader:
    def __init__(self, host):
        self.host = host

    def copy(self, expert, slot):
        if expert not in self.host:
            return False
        slot.expert = expert
        return True

    def adopt(self, expert, slot, table):
        """Takes the slot over only where the expert has weights."""
        if self.copy(expert, slot):
            table[expert] = slot
            return True
        return False


class ExpertCache:
    def __init__(self, slots, loader):
        self.slots = slots
        self.loader = loader
        self.resident = OrderedDict()
        self.warm = {}

    def lookup(self, expert):
        return self.resident.get(expert)

    def load(self, expert):
        if expert in self.resident:
            return self.lookup(expert)
        if not self.slots.has_vacant():
            self.evict_one()
        slot = self.slots.claim_slot()  # leak: adopt refuses an unknown expert and nobody returns the slot
        if slot is None:
            return None
        self.loader.adopt(expert, slot, self.resident)
        return self.resident.get(expert)

    def load_or_return(self, expert):
        if expert in self.resident:
            return self.resident[expert]
        slot = self.slots.claim_slot()  # clean: near miss, adopt's answer decides who returns it
        if slot is None:
            return None
        if not self.loader.adopt(expert, slot, self.resident):
            self.slots.return_slot(slot)
            return None
        return slot

    def evict_one(self):
        for expert, slot in self.resident.items():
            if slot.pins == 0:
                del self.resident[expert]
                self.slots.return_slot(slot)
                return True
        return False

    def warm_up(self, experts):
        for expert in experts:
            if expert in self.warm:
                continue
            slot = self.slots.claim_slot()  # leak: reset() throws the warm table away with its slots
            if slot is None:
                break
            self.loader.copy(expert, slot)
            self.warm[expert] = slot

    def reset(self):
        for slot in self.resident.values():
            self.slots.return_slot(slot)
        self.resident.clear()
        self.warm = {}


class ExpertRunner:
    def __init__(self, cache, loader, slots):
        self.cache = cache
        self.loader = loader
        self.slots = slots
        self.spill = []

    def run(self, tokens, routes):
        out = []
        for tok, expert in zip(tokens, routes):
            slot = self.cache.lookup(expert)
            if slot is not None:
                out.append(tok * slot.idx)
                continue
            tmp = self.slots.claim_slot()  # leak: tokens of an expert without weights move on with tmp claimed
            if tmp is None:
                out.append(tok)
                continue
            if not self.loader.copy(expert, tmp):
                out.append(tok)
                continue
            out.append(tok * tmp.idx)
            self.slots.return_slot(tmp)
        return out

    def run_shared(self, tokens, expert):
        slot = self.cache.lookup(expert)
        borrowed = slot is None
        if borrowed:
            slot = self.slots.claim_slot()  # clean: near miss, borrowed remembers whose slot it is
            if slot is None:
                return list(tokens)
        out = [t * slot.idx for t in tokens]
        if borrowed:
            self.slots.return_slot(slot)
        return out

    def run_quantised(self, tokens, expert, bits):
        scratch = self.slots.claim_slot()  # leak: returned for 4 bits only
        if scratch is None:
            return list(tokens)
        out = [t >> bits for t in tokens]
        if bits == 4:
            self.slots.return_slot(scratch)
        return out

    def spill_over(self, n):
        while len(self.spill) < n and self.slots.has_vacant():
            self.spill.append(self.slots.claim_slot())  # clean: near miss, stop() returns every spill slot

    def stop(self):
        for slot in self.spill:
            self.slots.return_slot(slot)
        self.spill.clear()


def swap_experts(slots, loader, resident, a, b):
    tmp = slots.claim_slot()  # clean: near miss, the finally covers the missing-expert returns
    if tmp is None:
        return False
    try:
        if a not in resident:
            return False
        tmp.expert = resident[a].expert
        if b not in resident:
            return False
        resident[a], resident[b] = resident[b], resident[a]
        return True
    finally:
        slots.return_slot(tmp)


def measure_load(slots, loader, experts):
    times = {}
    slot = slots.claim_slot()  # leak: rebound in the loop from the second expert on
    if slot is None:
        return times
    for i, expert in enumerate(experts):
        if i and slots.has_vacant():
            slot = slots.claim_slot()  # leak: replaces the slot of the turn before, which is never returned
        times[expert] = loader.copy(expert, slot)
    slots.return_slot(slot)
    return times
