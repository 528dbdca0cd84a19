"""Numbered broadcast channels with a bounded count."""
import threading
from contextlib import contextmanager


class Channel:
    def __init__(self, no, group):
        self.no = no
        self.group = group
        self.broken = False


class ChannelSet:
    def __init__(self, groups):
        self._permits = threading.Semaphore(len(groups))
        self._mutex = threading.Lock()
        self._parked = [Channel(i, g) for i, g in enumerate(groups)]

    def tune_in(self, timeout=None):
        if not self._permits.acquire(timeout=timeout):  # clean: tune_out() releases it with the channel
            return None
        with self._mutex:
            return self._parked.pop()  # clean: returned to the caller

    def tune_in_sound(self, timeout=None):
        """Like tune_in, but None when the channel is broken."""
        if not self._permits.acquire(timeout=timeout):  # leak: a broken channel returns None without the permit's release
            return None
        with self._mutex:
            ch = self._parked[-1]
            if ch.broken:
                return None
            return self._parked.pop()  # clean: returned to the caller

    def tune_out(self, ch):
        with self._mutex:
            self._parked.append(ch)
        self._permits.release()

    @contextmanager
    def on_air(self, timeout=None):
        ch = self.tune_in(timeout)  # clean: tuned out in the finally unless it is None
        try:
            yield ch
        finally:
            if ch is not None:
                self.tune_out(ch)
