# take: P.occupy()
# give: P.desert(X[0])
# gets: value
# type: BounceBuffers
import threading


class BounceBuffers:
    """Equal cuts of one bytearray. Gives (index, view)."""

    def __init__(self, count, cut):
        self._mem = memoryview(bytearray(count * cut))
        self._cut = cut
        self._occupied = [False] * count
        self._hint = 0
        self._lock = threading.Lock()
        self.turns = 0

    def _pick(self):
        n = len(self._occupied)
        for step in range(n):
            i = (self._hint + step) % n
            if not self._occupied[i]:
                return i
        raise MemoryError("every bounce buffer is occupied")

    def occupy(self):
        with self._lock:
            i = self._pick()
            self._occupied[i] = True
            self._hint = (i + 1) % len(self._occupied)
            self.turns += 1
        return i, self._mem[i * self._cut:(i + 1) * self._cut]

    def desert(self, index):
        with self._lock:
            if not self._occupied[index]:
                raise ValueError(f"bounce buffer {index} is not occupied")
            self._occupied[index] = False
