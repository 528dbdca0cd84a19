# take: P.open_bay()
# give: P.shut_bay(X[0])
# gets: value
# type: StagingDock
import numpy as np


class StagingDock:
    """One big host array cut in bays; open_bay() gives (bay number, writable view)."""

    def __init__(self, bays, rows, cols, dtype=np.float16):
        self._whole = np.empty((bays, rows, cols), dtype=dtype)
        self._state = bytearray(bays)  # 0 = shut, 1 = open

    def open_bay(self):
        bay = self._state.find(0)
        if bay < 0:
            raise BlockingIOError("all staging bays are open")
        self._state[bay] = 1
        return bay, self._whole[bay]

    def shut_bay(self, bay):
        if self._state[bay] != 1:
            raise ValueError("bay %r is shut" % (bay,))
        self._state[bay] = 0

    def open_count(self):
        return sum(self._state)
