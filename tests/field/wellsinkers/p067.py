"""Experts of a sparse model in a few device slots, with a pin count in a tensor."""
import torch


class ExpertSlots:
    def __init__(self, experts, slots, weights):
        self.weights = weights
        self.slot_of = torch.full((experts,), -1)
        self.resident = torch.full((slots,), -1)
        self.pins = torch.zeros(slots, dtype=torch.int32)

    def summon(self, expert):
        slot = int(self.slot_of[expert])
        if slot < 0:
            slot = self._evict()
            if slot < 0:
                return -1
            self.weights.upload(expert, slot)
            self.resident[slot] = expert
            self.slot_of[expert] = slot
        self.pins[slot] += 1
        return slot

    def _evict(self):
        idle = torch.nonzero(self.pins == 0).flatten()
        if idle.numel() == 0:
            return -1
        slot = int(idle[0])
        if self.resident[slot] >= 0:
            self.slot_of[self.resident[slot]] = -1
        return slot

    def dismiss(self, slot):
        self.pins[slot].sub_(1)


class MoeLayer:
    def __init__(self, slots, kernel):
        self.slots = slots
        self.kernel = kernel

    def forward(self, x, routes):
        out = torch.zeros_like(x)
        for expert in routes.unique().tolist():
            slot = self.slots.summon(expert)  # leak: experts without rows stay pinned
            if slot < 0:
                continue
            rows = (routes == expert).nonzero().flatten()
            if x[rows].abs().sum() == 0:
                continue
            out[rows] = self.kernel(x[rows], slot)
            self.slots.dismiss(slot)
        return out

    def single(self, x, expert):
        slot = self.slots.summon(expert)  # clean: dismissed in finally
        if slot < 0:
            return None
        try:
            return self.kernel(x, slot)
        finally:
            self.slots.dismiss(slot)


def preload(slots, kernel, expert, sample):
    slot = slots.summon(expert)  # clean: dismissed after the first run
    if slot >= 0:
        kernel(sample, slot)
        slots.dismiss(slot)
