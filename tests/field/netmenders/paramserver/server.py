from __future__ import annotations

import logging
from typing import Dict, Optional, Protocol

import torch

from .buffers import VersionPins, WireBuffers
from .codec import encode, encode_delta

log = logging.getLogger(__name__)


class Peer(Protocol):
    name: str
    alive: bool

    def send(self, data: memoryview) -> None: ...


class ShardServer:
    def __init__(self, buffers: WireBuffers, pins: VersionPins):
        self.buffers = buffers
        self.pins = pins
        self.history: Dict[int, torch.Tensor] = {}
        self.subscribed: Dict[str, int] = {}
        self.outbox: Dict[str, bytearray] = {}

    def commit(self, weights: torch.Tensor) -> int:
        self.pins.newest += 1
        self.history[self.pins.newest] = weights.clone()
        keep = self.pins.pinned() | {self.pins.newest}
        for v in [v for v in self.history if v not in keep]:
            del self.history[v]
        return self.pins.newest

    def on_pull(self, peer: Peer) -> bool:
        version = self.pins.pin_newest()  # clean: unpinned in finally
        try:
            frame = encode(self.buffers, version, self.history[version])  # leak: not given back when the peer is gone
            if frame is None:
                return False
            if not peer.alive:
                log.info("%s went away", peer.name)
                return False
            peer.send(memoryview(frame))
            self.buffers.unrent(frame)
            return True
        finally:
            self.pins.unpin(version)

    def on_pull_delta(self, peer: Peer, since: int) -> Optional[int]:
        if not self.pins.pin(since):  # leak: the version stays pinned when its weights were collected before
            return None
        base = self.history.get(since)
        if base is None:
            return None
        newest = self.pins.newest
        frame = encode_delta(self.buffers, newest, self.history[newest], base)  # clean: given back after the send, None needs nothing
        if frame is not None:
            peer.send(memoryview(frame))
            self.buffers.unrent(frame)
        self.pins.unpin(since)
        return newest

    def subscribe(self, peer: Peer) -> int:
        version = self.pins.pin_newest()  # clean: near miss, the version it replaces is unpinned, unsubscribe() does the last
        before = self.subscribed.get(peer.name)
        self.subscribed[peer.name] = version
        if before is not None:
            self.pins.unpin(before)
        return version

    def unsubscribe(self, name: str) -> None:
        version = self.subscribed.pop(name, None)
        if version is not None:
            self.pins.unpin(version)
        frame = self.outbox.pop(name, None)
        if frame is not None:
            self.buffers.unrent(frame)

    def enqueue(self, peer: Peer) -> bool:
        frame = encode(self.buffers, self.pins.newest, self.history[self.pins.newest])  # leak: a frame still waiting in the outbox is overwritten
        if frame is None:
            return False
        self.outbox[peer.name] = frame
        return True

    def flush(self, peers: Dict[str, Peer]) -> int:
        sent = 0
        for name in list(self.outbox):
            peer = peers.get(name)
            if peer is None:
                continue
            frame = self.outbox.pop(name)  # clean: given back after the send
            peer.send(memoryview(frame))
            self.buffers.unrent(frame)
            sent += 1
        return sent
