from __future__ import annotations

import logging
from collections import deque
from typing import Deque, Dict, Optional, Tuple

import torch.distributed as dist

from .buffers import BufferBook, P2PBuffer

log = logging.getLogger(__name__)


class P2PComm:
    def __init__(self, book: BufferBook, prev: Optional[int], nxt: Optional[int]):
        self.book = book
        self.prev = prev
        self.nxt = nxt
        self.sends: Deque[Tuple[P2PBuffer, dist.Work]] = deque()
        self.expected: Dict[int, Tuple[P2PBuffer, dist.Work]] = {}

    def recv(self, microbatch: int) -> Optional[P2PBuffer]:
        buf = self.book.get(microbatch)  # leak: the first stage finds that it has no predecessor only after taking a buffer
        if buf is None:
            return None
        if self.prev is None:
            return None
        dist.recv(buf.tensor, src=self.prev)
        return buf

    def expect(self, microbatch: int) -> bool:
        if self.prev is None or microbatch in self.expected:
            return False
        buf = self.book.get(microbatch)  # clean: near miss, arrival() hands it on and cancel() puts it back
        if buf is None:
            return False
        self.expected[microbatch] = (buf, dist.irecv(buf.tensor, src=self.prev))
        return True

    def arrival(self, microbatch: int) -> Optional[P2PBuffer]:
        entry = self.expected.pop(microbatch, None)
        if entry is None:
            return None
        buf, work = entry
        work.wait()
        return buf

    def send(self, buf: P2PBuffer) -> None:
        if self.nxt is None:
            self.book.put(buf)
            return
        self.sends.append((buf, dist.isend(buf.tensor, dst=self.nxt)))

    def drain(self) -> None:
        while self.sends:
            buf, work = self.sends.popleft()
            work.wait()
            self.book.put(buf)

    def cancel(self) -> None:
        for buf, work in self.expected.values():
            work.wait()
            self.book.put(buf)
        self.expected.clear()
        self.drain()

    def handshake(self, peer: int, tries: int) -> bool:
        for i in range(tries):
            buf = self.book.get(-1)  # clean: near miss, put back by each turn, refused or not
            if buf is None:
                return False
            try:
                dist.send(buf.tensor, dst=peer)
            except RuntimeError as e:
                log.warning("handshake %d with %d: %s", i, peer, e)
                self.book.put(buf)
                continue
            self.book.put(buf)
            return True
        return False
