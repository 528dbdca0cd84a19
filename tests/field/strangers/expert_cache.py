"""Mixture-of-experts: expert weights live in a few device slots."""
import enum


class ExpertSlots:
    def __init__(self, count):
        self._free = list(range(count))

    def take(self):
        return self._free.pop(0) if self._free else None

    def restore(self, slot):
        self._free.insert(0, slot)


class State(enum.Enum):
    COLD = 0
    LOADING = 1
    READY = 2


class Expert:
    def __init__(self, eid):
        self.eid = eid
        self.state = State.COLD
        self.slot = None


class ExpertCache:
    def __init__(self, slots, experts):
        self.slots = slots
        self.experts = [Expert(i) for i in range(experts)]
        self.loading = {}

    def begin(self, eid):
        expert = self.experts[eid]
        if expert.state is not State.COLD:
            return True
        slot = self.slots.take()  # clean: near miss, moves loading -> expert.slot, restored by fail or unload
        if slot is None:
            return False
        expert.state = State.LOADING
        self.loading[eid] = slot
        return True

    def complete(self, eid):
        slot = self.loading.pop(eid, None)
        if slot is None:
            return
        self.experts[eid].slot = slot
        self.experts[eid].state = State.READY

    def fail(self, eid):
        slot = self.loading.pop(eid, None)
        if slot is not None:
            self.slots.restore(slot)
            self.experts[eid].state = State.COLD

    def unload(self, eid):
        expert = self.experts[eid]
        if expert.state is State.READY:
            slot, expert.slot = expert.slot, None
            expert.state = State.COLD
            self.slots.restore(slot)

    def trial(self, eid, load):
        slot = self.slots.take()  # leak: restored only when loading worked
        if slot is None:
            return False
        if load(eid, slot):
            self.slots.restore(slot)
            return True
        return False

    def pair_trial(self, load):
        a, b = self.slots.take(), None  # leak: without a second slot the first stays taken
        if a is None:
            return 0
        b = self.slots.take()  # clean: near miss, restored unless it is none
        if b is None:
            return 1
        load(0, a)
        load(1, b)
        for slot in (a, b):
            self.slots.restore(slot)
        return 2

    def steal(self, eid):
        """Make room by force, then hand the slot to the caller's expert."""
        if self.experts[eid].state is State.LOADING:
            return False
        slot = self.slots.take()  # clean: near miss, stored in the expert on every path that has one
        if slot is None:
            for other in self.experts:
                if other.state is State.READY and other.eid != eid:
                    slot, other.slot = other.slot, None
                    other.state = State.COLD
                    break
        if slot is None:
            return False
        expert = self.experts[eid]
        if expert.slot is not None:
            self.slots.restore(expert.slot)
        expert.slot = slot
        expert.state = State.READY
        return True
