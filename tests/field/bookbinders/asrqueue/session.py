"""One caller's audio: chunks come in, text goes out."""
import logging
import threading
from collections import deque

from .lanes import AllLanesBusy

log = logging.getLogger("asr.session")


class BadAudio(ValueError):
    pass


class Session:
    def __init__(self, sid, lanes, chunks):
        self.sid = sid
        self._lanes = lanes
        self._chunks = chunks
        self._lane = None
        self._pending = deque()
        self._lock = threading.Lock()
        self.text = []
        self.muted = False

    def open(self):
        self._lane = self._lanes.assign(self.sid)  # clean: near miss, close() releases it and the server closes every session it has opened
        return self._lane.row

    @property
    def lane(self):
        return self._lane

    def push(self, pcm):
        """Takes one packet of samples; False when it was dropped."""
        chunk = self._chunks.get()  # leak: close() clears what is pending and puts none of it back
        if chunk is None:
            log.debug("%s: no chunk, packet dropped", self.sid)
            return False
        chunk[: len(pcm)] = pcm
        with self._lock:
            self._pending.append(chunk)
        return True

    def push_checked(self, pcm, rate):
        chunk = self._chunks.get()  # leak: BadAudio is raised while the chunk is held
        if chunk is None:
            return False
        if rate != 16000 or len(pcm) > len(chunk):
            raise BadAudio(f"{self.sid}: {len(pcm)} samples of {rate} Hz")
        chunk[: len(pcm)] = pcm
        with self._lock:
            self._pending.append(chunk)
        return True

    def pop(self):
        """The next chunk, which the batcher puts back, or None."""
        with self._lock:
            if self.muted or not self._pending:
                return None
            return self._pending.popleft()  # clean: goes to the caller

    def add_text(self, words):
        self.text.extend(words)

    def close(self):
        with self._lock:
            dropped = len(self._pending)
            self._pending.clear()
        if dropped:
            log.info("%s: closed with %d chunks pending", self.sid, dropped)
        lane, self._lane = self._lane, None
        if lane is not None:
            self._lanes.release(lane)


class Monitor:
    """Listens to a session's lane, for the supervisor's screen."""

    def __init__(self, lanes, lane):
        self._lanes = lanes
        self._lane = lanes.share(lane)  # clean: stop() releases it
        self.energy = []

    def tick(self):
        self.energy.append(float(self._lanes.state[self._lane.row].norm()))

    def stop(self):
        if self._lane is not None:
            self._lanes.release(self._lane)
            self._lane = None


def preflight(lanes, chunks, sid):
    """Is there room for another session at the moment?"""
    try:
        lane = lanes.assign(sid)  # leak: without a chunk the return comes before the release
    except AllLanesBusy:
        return False
    chunk = chunks.get()  # clean: put at once, when there is one
    if chunk is None:
        return False
    chunks.put(chunk)
    lanes.release(lane)
    return True
