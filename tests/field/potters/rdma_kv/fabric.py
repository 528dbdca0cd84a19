from __future__ import annotations

import threading
from typing import Dict, List, Optional, Tuple


class LinkDown(RuntimeError):
    pass


class QueuePair:
    def __init__(self, peer: str, qpn: int) -> None:
        self.peer = peer
        self.qpn = qpn
        self.connected = False
        self.posted: List[bytes] = []

    def handshake(self) -> None:
        if self.peer.startswith("down"):
            raise LinkDown(self.peer)
        self.connected = True

    def post(self, data: bytes) -> None:
        if not self.connected:
            raise LinkDown(self.peer)
        self.posted.append(data)


class Fabric:
    def __init__(self, max_qps: int) -> None:
        self.max_qps = max_qps
        self._open: Dict[int, QueuePair] = {}
        self._shared: Dict[str, Tuple[QueuePair, int]] = {}
        self._mu = threading.Lock()
        self._next = 0

    def open_qp(self, peer: str) -> QueuePair:
        with self._mu:
            if len(self._open) >= self.max_qps:
                raise RuntimeError("out of queue pairs")
            self._next += 1
            qp = QueuePair(peer, self._next)
            self._open[qp.qpn] = qp
            return qp

    def close_qp(self, qp: QueuePair) -> None:
        with self._mu:
            self._open.pop(qp.qpn)

    def connect(self, peer: str, retries: int = 3) -> Optional[QueuePair]:
        for _ in range(retries):
            qp = self.open_qp(peer)  # leak: a failed handshake is retried with a new pair, the old one stays open
            try:
                qp.handshake()
            except LinkDown:
                continue
            return qp
        return None

    def connect_once(self, peer: str) -> Optional[QueuePair]:
        qp = self.open_qp(peer)  # clean: closed when the handshake fails, else the caller's
        try:
            qp.handshake()
        except LinkDown:
            self.close_qp(qp)
            return None
        return qp

    # Shared pairs: one per peer, counted.

    def attach(self, peer: str) -> QueuePair:
        held = self._shared.get(peer)
        if held is not None:
            qp, refs = held
            self._shared[peer] = (qp, refs + 1)
            return qp
        qp = self.open_qp(peer)  # clean: near miss, closed by the last detach
        qp.connected = True
        self._shared[peer] = (qp, 1)
        return qp

    def detach(self, peer: str) -> None:
        qp, refs = self._shared[peer]
        if refs > 1:
            self._shared[peer] = (qp, refs - 1)
            return
        del self._shared[peer]
        self.close_qp(qp)
