"""SIMD-like lanes of an accelerator, lent as a bit mask."""


class LaneMask:
    def __init__(self, width):
        self.full = (1 << width) - 1
        self.busy = 0

    def idle(self):
        return bin(self.full & ~self.busy).count("1")

    def seize(self, count):
        """Mask of `count` lanes, or 0."""
        free = self.full & ~self.busy
        mask = 0
        while free and count:
            low = free & -free
            mask |= low
            free ^= low
            count -= 1
        if count:
            return 0
        self.busy |= mask
        return mask

    def relinquish(self, mask):
        self.busy &= ~mask


class VectorUnit:
    def __init__(self, lanes, port):
        self.lanes = lanes
        self.port = port
        self.resident = {}

    def broadcast(self, word, count):
        mask = self.lanes.seize(count)  # clean: given back after the write
        if not mask:
            return False
        self.port.write(mask, word)
        self.lanes.relinquish(mask)
        return True

    def reduce(self, words):
        mask = self.lanes.seize(len(words))  # leak: kept when the port is stalled
        if mask == 0:
            return sum(words)
        if self.port.stalled():
            return sum(words)
        self.port.scatter(mask, words)
        total = self.port.gather_sum(mask)
        self.lanes.relinquish(mask)
        return total

    def load_kernel(self, name, count):
        self.resident[name] = self.lanes.seize(count)  # clean: stored, given back by unload

    def unload(self, name):
        self.lanes.relinquish(self.resident.pop(name))


def self_test(lanes, port):
    for count in (1, 2, 4, 8):
        mask = lanes.seize(count)  # leak: lost by the break on a mismatch
        if not mask:
            break
        port.write(mask, 0xA5)
        if port.read(mask) != 0xA5:
            break
        lanes.relinquish(mask)
