"""Prefill side of disaggregated serving: stage KV layers and push them to decoders."""
from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Callable, Optional


@dataclass(eq=False)
class Segment:
    start: int
    nbytes: int
    retired: bool = False


class StagingRing:
    """Registered memory handed out in ring order, reclaimed in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.head = 0
        self.tail = 0
        self._order: deque[Segment] = deque()
        self._lock = threading.Lock()

    def claim(self, nbytes: int) -> Optional[Segment]:
        with self._lock:
            if self.head + nbytes - self.tail > self.capacity:
                return None
            seg = Segment(self.head, nbytes)
            self.head += nbytes
            self._order.append(seg)
            return seg

    def hand_back(self, seg: Segment) -> None:
        with self._lock:
            seg.retired = True
            while self._order and self._order[0].retired:
                self.tail += self._order.popleft().nbytes


class PeerBook:
    def __init__(self, connect: Callable) -> None:
        self._connect = connect
        self._idle: dict[str, list] = defaultdict(list)

    def dial(self, peer: str):
        idle = self._idle[peer]
        while idle:
            channel = idle.pop()  # clean: near miss, dead channels are closed, live ones handed out
            if channel.alive():
                return channel
            channel.close()
        return self._connect(peer)  # clean: handed to the caller

    def hang_up(self, channel) -> None:
        self._idle[channel.peer].append(channel)


class KVSender:
    def __init__(self, ring: StagingRing, book: PeerBook) -> None:
        self.ring = ring
        self.book = book
        self.sessions: dict[str, object] = {}
        self.outbox: queue.Queue = queue.Queue()
        self.failed: list[str] = []

    def push_layer(self, peer: str, layer) -> bool:
        seg = self.ring.claim(layer.nbytes)  # clean: handed back after the write
        if seg is None:
            return False
        layer.copy_into(seg)
        channel = self.book.dial(peer)  # clean: hung up after the write
        channel.write(seg)
        self.book.hang_up(channel)
        self.ring.hand_back(seg)
        return True

    def push_layer_async(self, channel, layer) -> bool:
        seg = self.ring.claim(layer.nbytes)  # clean: near miss, the completion callback hands it back
        if seg is None:
            return False
        layer.copy_into(seg)
        channel.write_async(seg, on_done=lambda _ok: self.ring.hand_back(seg))
        return True

    def push_tail_async(self, channel, req_id: str, tail) -> bool:
        seg = self.ring.claim(tail.nbytes)  # leak: callback keeps the segment when the write failed
        if seg is None:
            return False

        def completed(ok: bool) -> None:
            if not ok:
                self.failed.append(req_id)
                return
            self.ring.hand_back(seg)

        tail.copy_into(seg)
        channel.write_async(seg, on_done=completed)
        return True

    def push_with_retry(self, peer: str, payload: bytes) -> bool:
        for _ in range(3):
            channel = self.book.dial(peer)  # leak: the failed attempt's channel is neither closed nor hung up
            try:
                channel.write(payload)
            except ConnectionError:
                continue
            self.book.hang_up(channel)
            return True
        return False

    def notify_abort(self, peer: str, req_id: str) -> None:
        channel = self.book.dial(peer)  # clean: near miss, broken channel closed, good one hung up
        try:
            channel.call("abort", req_id)
        except ConnectionError:
            channel.close()
            return
        self.book.hang_up(channel)

    def handshake(self, peer: str, version: int) -> bool:
        channel = self.book.dial(peer)  # leak: version mismatch returns with the channel open
        reply = channel.call("hello", version)
        if reply.version != version:
            return False
        self.sessions[peer] = channel
        return True

    def enqueue(self, req, layers) -> int:
        """Stage as many layers as fit; the pump thread sends them."""
        staged = 0
        for layer in layers:
            seg = self.ring.claim(layer.nbytes)  # leak: a cancelled request breaks after the claim
            if seg is None or req.cancelled:
                break
            layer.copy_into(seg)
            self.outbox.put((req.peer, seg))
            staged += 1
        return staged

    def pump(self) -> None:
        while True:
            item = self.outbox.get()
            if item is None:
                return
            peer, seg = item
            channel = self.sessions.get(peer)
            if channel is not None:
                channel.write(seg)
            self.ring.hand_back(seg)

    def close(self) -> None:
        self.outbox.put(None)
        for channel in self.sessions.values():
            self.book.hang_up(channel)
        self.sessions.clear()
