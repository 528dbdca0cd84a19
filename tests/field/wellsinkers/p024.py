"""Epochs held open by readers; garbage waits for the oldest."""


class EpochClock:
    def __init__(self):
        self.now = 0
        self._open = {}
        self._garbage = []

    def advance(self):
        self.now += 1

    def enter_epoch(self):
        self._open[self.now] = self._open.get(self.now, 0) + 1
        return self.now

    def exit_epoch(self, epoch):
        self._open[epoch] -= 1
        if self._open[epoch] == 0:
            del self._open[epoch]
            self._sweep()

    def retire(self, thing):
        self._garbage.append((self.now, thing))

    def _sweep(self):
        oldest = min(self._open, default=self.now + 1)
        self._garbage = [(e, t) for e, t in self._garbage if e >= oldest]


class SkipIndex:
    def __init__(self, clock, root):
        self.clock = clock
        self.root = root

    def find(self, key):
        epoch = self.clock.enter_epoch()  # leak: found keys return inside the epoch
        node = self.root
        while node is not None:
            if node.key == key:
                return node.value
            node = node.right if node.key < key else node.down
        self.clock.exit_epoch(epoch)
        return None

    def replace(self, node, value):
        epoch = self.clock.enter_epoch()  # clean: left after the swap
        old, node.value = node.value, value
        self.clock.retire(old)
        self.clock.exit_epoch(epoch)

    def walk(self):
        epoch = self.clock.enter_epoch()  # clean: left in finally
        try:
            node = self.root
            while node is not None:
                yield node.key
                node = node.right
        finally:
            self.clock.exit_epoch(epoch)


def depth(index):
    index.clock.enter_epoch()  # leak: epoch number dropped
    node, n = index.root, 0
    while node is not None:
        node, n = node.down, n + 1
    return n
