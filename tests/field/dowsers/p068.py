"""Swap space: a lease ties a device block to a host block until it is swapped in."""
from dataclasses import dataclass


@dataclass(frozen=True)
class SwapPair:
    device: int
    host: int


class SwapSpace:
    def __init__(self, host_blocks):
        self._host = set(range(host_blocks))

    def swap_out(self, device):
        if not self._host:
            return None
        return SwapPair(device, self._host.pop())

    def swap_in(self, pair):
        self.discard(pair)
        return pair.device

    def discard(self, pair):
        self._host.add(pair.host)


class Preempter:
    def __init__(self, swap: SwapSpace, copier):
        self.swap = swap
        self.copier = copier
        self.swapped = {}

    def preempt(self, seq):
        pairs = []
        for block in seq.blocks:
            pair = self.swap.swap_out(block)  # clean: all in swapped, resume() swaps them in
            if pair is None:
                break
            pairs.append(pair)
        self.swapped[seq.id] = pairs
        self.copier.d2h(pairs)

    def resume(self, seq):
        pairs = self.swapped.pop(seq.id)
        self.copier.h2d(pairs)
        return [self.swap.swap_in(p) for p in pairs]

    def preempt_one(self, block):
        pair = self.swap.swap_out(block)  # leak: a failed copy returns False with the pair
        if pair is None or not self.copier.d2h([pair]):
            return False
        self.swapped[block] = [pair]
        return True

    def round_trip(self, block):
        pair = self.swap.swap_out(block)  # clean: discarded in finally
        if pair is None:
            return None
        try:
            return self.copier.check(pair)
        finally:
            self.swap.discard(pair)

    def count_room(self, blocks):
        room = 0
        while room < len(blocks) and self.swap.swap_out(blocks[room]):  # leak: the pairs are dropped
            room += 1
        return room
