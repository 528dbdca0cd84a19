"""Arena in which documents wait for the tokeniser."""


class Extent:
    __slots__ = ("start", "length")

    def __init__(self, start, length):
        self.start = start
        self.length = length


class StageArena:
    def __init__(self, size):
        self.mem = bytearray(size)
        self._holes = [Extent(0, size)]

    def carve(self, n):
        for i, hole in enumerate(self._holes):
            if hole.length >= n:
                ext = Extent(hole.start, n)
                hole.start += n
                hole.length -= n
                if hole.length == 0:
                    del self._holes[i]
                return ext
        return None

    def fill_in(self, ext):
        self._holes.append(ext)
        self._holes.sort(key=lambda h: h.start)
        merged = [self._holes[0]]
        for h in self._holes[1:]:
            last = merged[-1]
            if last.start + last.length == h.start:
                last.length += h.length
            else:
                merged.append(h)
        self._holes = merged

    def store(self, data):
        ext = self.carve(len(data))  # clean: None or returned to the caller
        if ext is not None:
            self.mem[ext.start:ext.start + ext.length] = data
        return ext

    def load(self, ext):
        return bytes(self.mem[ext.start:ext.start + ext.length])

    def recarve(self, ext, n):
        """Moves the contents to an extent of n bytes."""
        new = self.carve(n)  # clean: returned to the caller, old one filled in
        if new is None:
            return None
        m = min(n, ext.length)
        self.mem[new.start:new.start + m] = self.mem[ext.start:ext.start + m]
        self.fill_in(ext)
        return new
