# take: P.throttle(n)
# give: P.landed(n)
# gets: nothing
# type: InflightBytes
import threading


class InflightBytes:
    """Async checkpoint uploads: block while more than `cap` bytes are on the wire.

    One oversized object is let through when the wire is empty.
    """

    def __init__(self, cap: int = 2 << 30):
        self._cap = cap
        self._flying = 0
        self._cv = threading.Condition(threading.Lock())

    def _may_fly(self, nbytes):
        return self._flying == 0 or self._flying + nbytes <= self._cap

    def throttle(self, nbytes: int) -> None:
        with self._cv:
            while not self._may_fly(nbytes):
                self._cv.wait()
            self._flying += nbytes

    def landed(self, nbytes: int) -> None:
        with self._cv:
            self._flying -= nbytes
            self._cv.notify_all()
