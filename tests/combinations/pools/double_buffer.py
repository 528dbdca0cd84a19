# take: P.begin_write(n)
# give: P.end_write(X)
# gets: value
# type: FlipBuffers
import threading


class Side:
    def __init__(self, parity):
        self.parity = parity
        self.data = bytearray()
        self.writing = False


class FlipBuffers:
    """Two sides used in turn; waits for the side whose turn it is."""

    def __init__(self):
        self._sides = (Side(0), Side(1))
        self._step = 0
        self._quiet = threading.Condition()

    def begin_write(self, nbytes):
        with self._quiet:
            while self._sides[self._step & 1].writing:
                self._quiet.wait()
            side = self._sides[self._step & 1]
            self._step += 1
            side.writing = True
            if len(side.data) < nbytes:
                side.data.extend(bytes(nbytes - len(side.data)))
            return side

    def end_write(self, side):
        with self._quiet:
            side.writing = False
            self._quiet.notify_all()
