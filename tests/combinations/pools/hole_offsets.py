# take: P.place(64)
# give: P.unplace(X, 64)
# gets: optional
class Pool:
    def __init__(self, size):
        self._holes = [(0, size)]

    def place(self, size):
        for index, (offset, length) in enumerate(self._holes):
            if length < size:
                continue
            if length == size:
                del self._holes[index]
            else:
                self._holes[index] = (offset + size, length - size)
            return offset
        return None

    def unplace(self, offset, size):
        self._holes.append((offset, size))
        self._holes.sort()
