"""Point-to-point between neighbouring stages, over torch.distributed."""
import collections

import torch.distributed as dist

from .slots import ActPool, Credits


class PeerGone(RuntimeError):
    pass


class Pending:
    """A transfer on its way. Its Act is in use until wait() or settle()."""

    def __init__(self, work, act, credits=None):
        self.work, self.act, self.credits = work, act, credits

    def done(self):
        return self.work.is_completed()

    def settle(self):
        act, self.act = self.act, None
        if act is not None:
            act.unref()
            if self.credits is not None:
                self.credits.put()

    def wait(self):
        self.work.wait()
        self.settle()


class Channel:
    def __init__(self, peer, pool: ActPool, credits: Credits, group=None):
        self.peer, self.pool, self.credits, self.group = peer, pool, credits, group
        self.alive = True
        self._sends = collections.deque()

    def _expect_peer(self):
        if not self.alive:
            raise PeerGone(self.peer)

    def send(self, act):
        """Asynchronous; keeps a use of its own. False when the wire is full."""
        if not self.credits.take_one():  # clean: near miss, put back when the peer is gone, otherwise by the pending transfer
            return False
        if not self.alive:
            self.credits.put()
            raise PeerGone(self.peer)
        held = act.ref()  # clean: near miss, the pending transfer in the queue drops it
        work = dist.isend(held.buf, self.peer, group=self.group)
        self._sends.append(Pending(work, held, self.credits))
        return True

    def recv(self, mb):
        """A Pending whose act is the caller's after the work has been waited for."""
        act = self.pool.borrow(mb)  # leak: for a peer that is gone _expect_peer() raises after the borrow
        self._expect_peer()
        return Pending(dist.irecv(act.buf, self.peer, group=self.group), act)

    def sweep(self):
        """Drops what the wire has taken."""
        n = 0
        while self._sends and self._sends[0].done():
            self._sends.popleft().settle()
            n += 1
        return n

    def flush(self):
        while self._sends:
            self._sends.popleft().wait()
