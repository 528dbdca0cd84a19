"""Two-level object cache: a magazine per thread over a shared depot."""
import threading


class TwoLevel:
    BATCH = 8

    def __init__(self, make):
        self._make = make
        self._local = threading.local()
        self._depot = []
        self._lock = threading.Lock()

    @property
    def _magazine(self):
        mag = getattr(self._local, "mag", None)
        if mag is None:
            mag = self._local.mag = []
        return mag

    def draw(self):
        mag = self._magazine
        if not mag:
            with self._lock:
                mag.extend(self._depot[-self.BATCH:])
                del self._depot[-self.BATCH:]
        return mag.pop() if mag else self._make()

    def stow(self, obj):
        mag = self._magazine
        mag.append(obj)
        if len(mag) >= 2 * self.BATCH:
            with self._lock:
                self._depot.extend(mag[: self.BATCH])
            del mag[: self.BATCH]


class Parser:
    def __init__(self, arenas):
        self.arenas = arenas

    def parse(self, text):
        arena = self.arenas.draw()  # leak: kept when there is no tree
        tree = arena.build(text)
        if tree is None:
            return None
        result = tree.detach()
        self.arenas.stow(arena)
        return result

    def validate(self, text):
        arena = self.arenas.draw()  # clean: stowed in finally
        try:
            return arena.build(text) is not None
        finally:
            self.arenas.stow(arena)

    def tokens(self, text):
        arena = self.arenas.draw()  # clean: stowed before the return
        out = list(arena.scan(text))
        self.arenas.stow(arena)
        return out


def bench(arenas, texts):
    for text in texts:
        arena = arenas.draw()  # leak: never stowed
        arena.build(text)
    return len(texts)
