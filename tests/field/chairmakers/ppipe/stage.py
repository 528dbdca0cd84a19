"""One stage: takes an activation, runs its layers, passes it on."""
import logging

import torch

from .comm import Channel, PeerGone
from .slots import ActPool

log = logging.getLogger("pp")


class StageFault(Exception):
    def __init__(self, mb, why):
        super().__init__(f"micro-batch {mb}: {why}")
        self.mb = mb


class Stage:
    def __init__(self, rank, world, layers, pool: ActPool, left: Channel, right: Channel):
        self.rank, self.world, self.layers = rank, world, layers
        self.pool, self.left, self.right = pool, left, right
        self.stash = {}
        self.ahead = None

    @property
    def first(self):
        return self.rank == 0

    @property
    def last(self):
        return self.rank == self.world - 1

    def load_ahead(self, mb):
        """Posts the receive of the next micro-batch early."""
        if not self.first:
            self.ahead = self.left.recv(mb)  # leak: a receive that was posted for another micro-batch is overwritten unsettled

    def _input(self, mb, embeds):
        if self.first:
            act = self.pool.borrow(mb)  # clean: returned
            act.buf.copy_(embeds)
            return act
        pending, self.ahead = self.ahead, None
        if pending is None:
            pending = self.left.recv(mb)  # clean: near miss, only its work is waited for, the act goes out to the caller
        pending.work.wait()
        return pending.act

    def forward(self, mb, embeds=None, keep=False):
        """Output of this stage for a micro-batch; the caller has one use of it."""
        x = self._input(mb, embeds)  # clean: near miss, unref'd in the finally, and the stash counts a use of its own
        try:
            y = self.pool.borrow(mb)  # leak: a non-finite output raises StageFault, and only x is dropped then
            with torch.no_grad():
                h = x.buf
                for layer in self.layers:
                    h = layer(h)
                y.buf.copy_(h)
            if not torch.isfinite(h).all():
                raise StageFault(mb, "non-finite")
            if keep:
                self.drop_stash(mb)
                self.stash[mb] = x.ref()  # clean: an older one of the micro-batch was dropped, finish() and close() drop this one
            return y
        finally:
            x.unref()

    def drop_stash(self, mb):
        act = self.stash.pop(mb, None)
        if act is not None:
            act.unref()

    def recompute(self, mb):
        """Runs a stashed micro-batch again, after its layers were swapped."""
        x = self.stash.get(mb)
        if x is None:
            return None
        y = self.pool.borrow(mb)  # clean: the caller has it
        h = x.buf
        for layer in self.layers:
            h = layer(h)
        y.buf.copy_(h)
        return y

    def pass_on(self, y):
        """Sends y to the right; the wire may be full for a while."""
        try:
            while not self.right.send(y):
                if not self.right.sweep():
                    self.right.flush()
        except PeerGone as exc:
            log.warning("stage %d: %s is gone", self.rank, exc)
        finally:
            y.unref()

    def finish(self, mb):
        self.drop_stash(mb)

    def close(self):
        for mb in list(self.stash):
            self.drop_stash(mb)
        if self.ahead is not None:
            self.ahead.wait()
        self.right.flush()
