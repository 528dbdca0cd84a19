from __future__ import annotations

import itertools
import queue
import threading
from typing import Callable, NamedTuple

from .blocks import BlockLease


class Channel(NamedTuple):
    peer: str
    qp: int


class TransferLink:
    """Queue pairs to the decode nodes. open_channel/close_channel bracket a migration."""

    def __init__(self, backend, max_qp: int) -> None:
        self.backend = backend
        self._qps = list(range(max_qp))
        self._mu = threading.Lock()

    def open_channel(self, peer: str) -> Channel | None:
        with self._mu:
            if not self._qps:
                return None
            qp = self._qps.pop()  # clean: near miss, appended again when the peer does not connect
        if not self.backend.connect(peer, qp):
            with self._mu:
                self._qps.append(qp)
            return None
        return Channel(peer, qp)

    def close_channel(self, ch: Channel) -> None:
        self.backend.disconnect(ch.peer, ch.qp)
        with self._mu:
            self._qps.append(ch.qp)

    def open_mesh(self, peers: list[str]) -> list[Channel]:
        chans: list[Channel] = []
        for p in peers:
            ch = self.open_channel(p)  # clean: near miss, a peer that is down closes those already open
            if ch is None:
                for c in chans:
                    self.close_channel(c)
                return []
            chans.append(ch)
        return chans

    def probe(self, peers: list[str]) -> dict[str, float]:
        rtt: dict[str, float] = {}
        for p in peers:
            ch = self.open_channel(p)  # leak: a peer that answers with a negative time is skipped with its channel open
            if ch is None:
                continue
            us = self.backend.ping(ch.qp)
            if us < 0:
                continue
            rtt[p] = us
            self.close_channel(ch)
        return rtt


class SendQueue:
    """Background sender, calls done(lease, ok) when a lease has been written out."""

    def __init__(self, link: TransferLink) -> None:
        self.link = link
        self._q: queue.PriorityQueue = queue.PriorityQueue()
        self._seq = itertools.count()
        self._t = threading.Thread(target=self._loop, daemon=True)
        self._t.start()

    def submit(self, prio: int, peer: str, lease: BlockLease, done: Callable[[BlockLease, bool], None]) -> None:
        self._q.put((prio, next(self._seq), peer, lease, done))

    def _loop(self) -> None:
        while True:
            _, _, peer, lease, done = self._q.get()
            if lease is None:
                return
            ch = self.link.open_channel(peer)  # clean: near miss, the finally closes it also when the write fails
            if ch is None:
                done(lease, False)
                continue
            ok = False
            try:
                ok = self.link.backend.write_blocks(ch.qp, lease.ids)
            except OSError:
                ok = False
            finally:
                self.link.close_channel(ch)
                done(lease, ok)

    def stop(self) -> None:
        self._q.put((1 << 30, next(self._seq), "", None, None))
        self._t.join()
