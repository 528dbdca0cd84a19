# take: P.ride()
# give: P.alight(X)
# gets: value
# type: StreamCarousel
import threading


class CopyStream:
    def __init__(self, ordinal):
        self.ordinal = ordinal
        self.riders = 0

    def __repr__(self):
        return f"<stream {self.ordinal} riders={self.riders}>"


class StreamCarousel:
    """Streams may be shared; a newcomer is put on the emptiest, up to `per_stream` riders."""

    def __init__(self, count, per_stream):
        self._streams = tuple(CopyStream(i) for i in range(count))
        self._per = per_stream
        self._changed = threading.Condition()

    def _emptiest(self):
        return min(self._streams, key=lambda s: (s.riders, s.ordinal))

    def ride(self):
        with self._changed:
            self._changed.wait_for(lambda: self._emptiest().riders < self._per)
            s = self._emptiest()
            s.riders += 1
            return s

    def alight(self, stream):
        with self._changed:
            stream.riders -= 1
            self._changed.notify()
