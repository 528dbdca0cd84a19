"""Reference-counted blocks shared by sequences with a common prefix."""


class RefCountedBlocks:
    def __init__(self, size):
        self.counts = [0] * size
        self.idle = list(range(size))

    def take_fresh(self):
        block = self.idle.pop()
        self.counts[block] = 1
        return block

    def incref(self, block):
        self.counts[block] += 1

    def decref(self, block):
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.idle.append(block)
