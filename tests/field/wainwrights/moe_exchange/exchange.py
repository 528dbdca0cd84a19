"""Moves rows between ranks.  A transfer takes a credit at the sender; the receiver's acknowledgement refunds it."""
import logging
import threading

import torch

from .windows import CreditTimeout, Credits, WindowPool, WindowShortage

log = logging.getLogger("moe")


class Transfer:
    def __init__(self, peer, windows):
        self.peer, self.windows, self.handles = peer, windows, []
        self.finished = threading.Event()


class Exchange:
    def __init__(self, net, pool: WindowPool, credits: Credits, rank: int):
        self.net, self.pool, self.credits, self.rank = net, pool, credits, rank
        self._open = {}
        self._lock = threading.Lock()
        net.on_ack(self._acked)

    def _register(self, t):
        with self._lock:
            self._open[(t.peer, id(t))] = t
        return t

    def send_plan(self, x, plan):
        """Start the transfers of a plan; wait_all() or an ack ends them."""
        started = []
        for peer, rows in plan.rows.items():
            if peer == self.rank or not len(rows):
                continue
            self.credits.spend(peer)  # clean: near miss, refunded by _acked() when the receiver is through
            for w, part in zip(plan.windows[peer], rows.split(self.pool.rows)):
                w.put(x[part])
            t = self._register(Transfer(peer, []))
            t.handles = [self.net.write(peer, w.index, w.get()) for w in plan.windows[peer]]
            started.append(t)
        return started

    def _acked(self, peer):
        with self._lock:
            key = next((k for k in self._open if k[0] == peer), None)
            t = self._open.pop(key, None)
        if t is None:
            log.warning("rank %d acknowledged what we did not send", peer)
            return
        for w in t.windows:
            self.pool.close(w)
        self.credits.refund(peer)
        t.finished.set()

    def send_one(self, peer, x):
        if len(x) > self.pool.rows:
            raise ValueError("%d rows in a window of %d" % (len(x), self.pool.rows))
        w = self.pool.open()  # leak: a CreditTimeout is logged and turned into None with the window open
        try:
            self.credits.spend(peer, timeout=2.0)  # clean: refunded in _acked()
        except CreditTimeout as e:
            log.warning("%s", e)
            return None
        t = self._register(Transfer(peer, [w]))
        t.handles = [self.net.write(peer, w.index, w.put(x).get())]
        return t

    def nudge(self, peers):
        reached = []
        for p in peers:
            if not self.credits.try_spend(p):  # leak: a peer that does not answer the ping is passed over with the credit spent
                continue
            if not self.net.ping(p):
                continue
            reached.append(p)
            self.credits.refund(p)
        return reached

    def receive(self, peer, rows):
        ws = self.pool.open_for(rows, tag=("rx", peer))  # clean: near miss, an empty list holds nothing and the tag closes the others
        if not ws:
            raise WindowShortage("%d rows of rank %d" % (rows, peer))
        try:
            for w in ws:
                w.rows = self.net.read(peer, w.index, w.tensor)
            return torch.cat([w.get().clone() for w in ws])
        finally:
            self.pool.close_tag(("rx", peer))
            self.net.ack(peer)

    def swap(self, peer, x):
        mine = self.pool.open_even(self.rank % 2)  # clean: closed in finally
        if mine is None:
            return None
        try:
            self.net.write(peer, mine.index, mine.put(x).get())
            with self.credits.spent(peer):  # clean: context manager
                theirs = self.pool.open_even(1 - self.rank % 2)  # leak: a reply of another length returns None with the window open
                if theirs is None:
                    return None
                theirs.rows = self.net.read(peer, theirs.index, theirs.tensor)
                if theirs.rows != len(x):
                    log.error("rank %d swapped %d rows for %d", peer, theirs.rows, len(x))
                    return None
                out = theirs.get().clone()
                self.pool.close(theirs)
                return out
        finally:
            self.pool.close(mine)

    def wait_all(self, transfers):
        for t in transfers:
            for h in t.handles:
                h.wait()
            t.finished.wait()
