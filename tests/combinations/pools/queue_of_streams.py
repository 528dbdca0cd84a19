# take: P.next_stream()
# give: P.stream_done(X)
# gets: optional
import queue


class Pool:
    def __init__(self, streams):
        self._ready = queue.SimpleQueue()
        for stream in streams:
            self._ready.put(stream)

    def next_stream(self):
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    def stream_done(self, stream):
        self._ready.put(stream)
