# take: P.encode(n)
# give: P.sent(X)
# gets: optional
class Frames:
    def __init__(self, count):
        self._stack = [bytearray(4096) for _ in range(count)]

    def lease(self):
        return self._stack.pop() if self._stack else None

    def unlease(self, frame):
        self._stack.append(frame)


class Pool:
    """Hands on what shows the memory that another lends."""

    def __init__(self, frames: Frames):
        self.frames = frames

    def encode(self, size):
        frame = self.frames.lease()
        if frame is None:
            return None
        frame[0] = 1
        return memoryview(frame)[:size]

    def sent(self, view):
        self.frames.unlease(view.obj)
