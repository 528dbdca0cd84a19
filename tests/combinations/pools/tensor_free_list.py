# take: P.alloc(4)
# give: P.free(X)
# gets: optional
import torch


class Pool:
    def __init__(self, size):
        self.free_slots = torch.arange(size)

    def alloc(self, need):
        if need > len(self.free_slots):
            return None
        select = self.free_slots[:need]
        self.free_slots = self.free_slots[need:]
        return select

    def free(self, idx):
        self.free_slots = torch.cat([self.free_slots, idx])
