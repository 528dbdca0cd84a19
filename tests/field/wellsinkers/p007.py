"""Particle ids from a free list threaded through an array."""
import numpy as np

END = -1


class ParticleIds:
    def __init__(self, n):
        self.next = np.arange(1, n + 1, dtype=np.int32)
        self.next[n - 1] = END
        self.head = 0
        self.live = 0

    def spawn(self):
        slot = int(self.head)
        if slot == END:
            return END
        self.head = self.next[slot]
        self.next[slot] = END
        self.live += 1
        return slot

    def kill(self, slot):
        self.next[slot] = self.head
        self.head = slot
        self.live -= 1


class Emitter:
    def __init__(self, ids, pos):
        self.ids = ids
        self.pos = pos
        self.mine = []

    def burst(self, origin, n):
        for _ in range(n):
            slot = self.ids.spawn()  # clean: kept in the list, killed by clear
            if slot == END:
                return
            self.pos[slot] = origin
            self.mine.append(slot)

    def clear(self):
        while self.mine:
            self.ids.kill(self.mine.pop())

    def spark(self, origin, bounds):
        slot = self.ids.spawn()  # leak: slot lost when the origin is out of bounds
        if slot == END:
            return
        if not bounds.contains(origin):
            return
        self.pos[slot] = origin
        self.mine.append(slot)

    def flash(self, origin, renderer):
        slot = self.ids.spawn()  # clean: killed after the draw
        if slot != END:
            self.pos[slot] = origin
            renderer.draw(slot)
            self.ids.kill(slot)


def measure(ids, renderer, n):
    for _ in range(n):
        ids.spawn()  # leak: result dropped
    renderer.resize(ids.live)
