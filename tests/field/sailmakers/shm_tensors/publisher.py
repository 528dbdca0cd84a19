import itertools
import logging
from typing import Dict, Iterable, List, Optional

import numpy as np

from .segment import Chunk, ScopedChunk, Segment

log = logging.getLogger(__name__)


class Publisher:
    def __init__(self, seg: Segment, sock):
        self.seg, self.sock = seg, sock
        self.unacked: Dict[int, Chunk] = {}
        self._seq = itertools.count()

    def publish(self, arr: np.ndarray) -> Optional[int]:
        raw = arr.reshape(-1).view(np.uint8)
        with ScopedChunk(self.seg, raw.nbytes) as sc:  # clean: context manager, keep() moves the chunk to self.unacked
            if sc.c is None:
                return None
            sc.c.array()[:] = raw
            seq = next(self._seq)
            if not self._announce(seq, sc.c, arr):
                return None
            self.unacked[seq] = sc.keep()
        return seq

    def _announce(self, seq: int, c: Chunk, arr: np.ndarray) -> bool:
        try:
            self.sock.send_json({"seq": seq, "chunk": c.index, "shape": arr.shape, "dtype": str(arr.dtype)})
        except OSError as e:
            log.error("announce %d: %s", seq, e)
            return False
        return True

    def publish_many(self, arrs: Iterable[np.ndarray]) -> List[int]:
        seqs = []
        for arr in arrs:
            raw = arr.reshape(-1).view(np.uint8)
            c = self.seg.reserve(raw.nbytes, timeout=1.0)  # leak: a failed announce breaks with the chunk in hand
            if c is None:
                break
            c.array()[:] = raw
            seq = next(self._seq)
            if not self._announce(seq, c, arr):
                break
            self.unacked[seq] = c
            seqs.append(seq)
        return seqs

    def publish_replacing(self, arr: np.ndarray, old_seq: int) -> Optional[int]:
        raw = arr.reshape(-1).view(np.uint8)
        c = self.unacked.get(old_seq)
        fresh = c is None or c.nbytes < raw.nbytes
        if fresh:
            c = self.seg.reserve(raw.nbytes)  # clean: near miss, surrendered under the fresh flag, else in self.unacked
            if c is None:
                return None
        c.array()[:raw.nbytes] = raw
        seq = next(self._seq)
        if not self._announce(seq, c, arr):
            if fresh:
                self.seg.surrender(c)
            return None
        if not fresh:
            del self.unacked[old_seq]
        self.unacked[seq] = c
        return seq

    def broadcast(self, arr: np.ndarray, peers) -> int:
        raw = arr.reshape(-1).view(np.uint8)
        c = self.seg.reserve(raw.nbytes)  # leak: zero deliveries leave the chunk with no reader to acknowledge it
        if c is None:
            return 0
        c.array()[:] = raw
        seq = next(self._seq)
        for p in peers:
            if p.send(seq, c.index):
                c.readers += 1
        if c.readers:
            self.unacked[seq] = c
        return c.readers

    def on_ack(self, seq: int) -> None:
        c = self.unacked.get(seq)
        if c is None:
            return
        c.readers -= 1
        if c.readers <= 0:
            del self.unacked[seq]
            self.seg.surrender(c)

    def close(self) -> None:
        while self.unacked:
            _, c = self.unacked.popitem()
            self.seg.surrender(c)
