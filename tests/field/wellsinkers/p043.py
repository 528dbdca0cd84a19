"""Arena with marks: a mark is rewound to give back all that came after it."""
import numpy as np


class StackArena:
    def __init__(self, nbytes):
        self._mem = np.empty(nbytes, dtype=np.uint8)
        self._top = 0
        self._marks = []

    def mark(self):
        self._marks.append(self._top)
        return len(self._marks) - 1

    def push(self, nbytes):
        start = self._top
        if start + nbytes > self._mem.size:
            raise MemoryError(nbytes)
        self._top += (nbytes + 63) & ~63
        return self._mem[start:start + nbytes]

    def rewind(self, level):
        if level != len(self._marks) - 1:
            raise ValueError("marks are rewound in order")
        self._top = self._marks[level]
        del self._marks[level:]


class Frame:
    def __init__(self, arena):
        self.arena = arena
        self.level = None

    def begin(self):
        self.level = self.arena.mark()  # clean: stored, rewound by end

    def end(self):
        self.arena.rewind(self.level)
        self.level = None


def blur(arena, image, radius):
    level = arena.mark()  # clean: rewound in finally
    try:
        tmp = arena.push(image.nbytes)
        tmp[:] = image.view(np.uint8).ravel()
        return np.roll(tmp, radius).sum()
    finally:
        arena.rewind(level)


def encode(arena, image, quality):
    level = arena.mark()  # leak: the lossless branch does not rewind
    tmp = arena.push(image.nbytes)
    if quality >= 100:
        return tmp.tobytes()
    arena.rewind(level)
    return (tmp // 2).tobytes()


def mipmaps(arena, image, levels):
    sums = []
    for n in range(levels):
        level = arena.mark()  # leak: the break at size zero leaves a mark
        size = image.nbytes >> (2 * n)
        if size == 0:
            break
        sums.append(arena.push(size).sum())
        arena.rewind(level)
    return sums
