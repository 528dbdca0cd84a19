"""Point-to-point transport with retries over a pool of channels."""
from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import time
from collections import defaultdict
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)
LEN = struct.Struct("<Q")


class Channel:
    def __init__(self, peer: Tuple[str, int], sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.healthy = True

    def send(self, payload: bytes) -> None:
        self.sock.sendall(LEN.pack(len(payload)) + payload)

    def recv(self) -> bytes:
        (n,) = LEN.unpack(self._exactly(LEN.size))
        return self._exactly(n)

    def _exactly(self, n: int) -> bytes:
        parts = bytearray()
        while len(parts) < n:
            piece = self.sock.recv(min(65536, n - len(parts)))
            if not piece:
                self.healthy = False
                raise ConnectionError("peer closed the channel")
            parts += piece
        return bytes(parts)


class ChannelPool:
    def __init__(self, limit: int, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self._slots = threading.Semaphore(limit)
        self._idle: Dict[Tuple[str, int], List[Channel]] = defaultdict(list)
        self._mutex = threading.Lock()

    def open_channel(self, peer: Tuple[str, int]) -> Optional[Channel]:
        if not self._slots.acquire(timeout=self.timeout):  # clean: near miss, the slot goes with the channel and the refused connection releases it
            return None
        with self._mutex:
            if self._idle[peer]:
                return self._idle[peer].pop()  # clean: handed to the caller
        try:
            sock = socket.create_connection(peer, self.timeout)  # clean: wrapped in the channel that is returned
        except OSError:
            self._slots.release()
            return None
        return Channel(peer, sock)

    def close_channel(self, channel: Channel) -> None:
        if channel.healthy:
            with self._mutex:
                self._idle[channel.peer].append(channel)
        else:
            channel.sock.close()
        self._slots.release()

    def purge(self, peer: Tuple[str, int]) -> int:
        closed = 0
        with self._mutex:
            while self._idle[peer]:
                channel = self._idle[peer].pop()  # leak: unhealthy channels are counted but their sockets stay open
                closed += 1
                if not channel.healthy:
                    continue
                channel.sock.close()
        return closed


class RetryPolicy:
    def __init__(self, attempts: int = 4, base: float = 0.05) -> None:
        self.attempts = attempts
        self.base = base

    def pause(self, attempt: int) -> None:
        time.sleep(self.base * (2**attempt) * (1 + random.random()))


class Transport:
    def __init__(self, pool: ChannelPool, policy: Optional[RetryPolicy] = None) -> None:
        self.pool = pool
        self.policy = policy or RetryPolicy()
        self._subscriptions: Dict[str, Channel] = {}
        self._control: Optional[Channel] = None

    def push(self, peer: Tuple[str, int], t: Tensor) -> bool:
        payload = t.detach().cpu().contiguous().numpy().tobytes()
        for attempt in range(self.policy.attempts):
            channel = self.pool.open_channel(peer)  # clean: near miss, closed in finally before the return, the break and each retry
            if channel is None:
                self.policy.pause(attempt)
                continue
            try:
                channel.send(payload)
                return True
            except ConnectionError:
                channel.healthy = False
                if attempt + 1 == self.policy.attempts:
                    break
            finally:
                self.pool.close_channel(channel)
            self.policy.pause(attempt)
        return False

    def pull(self, peer: Tuple[str, int], request: bytes) -> Optional[bytes]:
        for attempt in range(self.policy.attempts):
            channel = self.pool.open_channel(peer)  # leak: the handler retries with a new channel and does not close the broken one
            if channel is None:
                continue
            try:
                channel.send(request)
                answer = channel.recv()
            except ConnectionError:
                log.info("retry %d", attempt)
                self.policy.pause(attempt)
                continue
            self.pool.close_channel(channel)
            return answer
        return None

    def ping(self, peer: Tuple[str, int]) -> Optional[float]:
        channel = self.pool.open_channel(peer)  # clean: near miss, both the handler and the normal way close it
        if channel is None:
            return None
        start = time.perf_counter()
        try:
            channel.send(b"ping")
            channel.recv()
        except (ConnectionError, socket.timeout):
            channel.healthy = False
            self.pool.close_channel(channel)
            return None
        self.pool.close_channel(channel)
        return time.perf_counter() - start

    def open_with_backup(self, main: Tuple[str, int], backup: Tuple[str, int]) -> Optional[Channel]:
        channel = self.pool.open_channel(main)  # clean: near miss, replaced by the backup only when it is None
        if channel is None:
            channel = self.pool.open_channel(backup)  # clean: handed to the caller
        return channel

    def fetch_from_any(self, peers: List[Tuple[str, int]], request: bytes) -> Optional[bytes]:
        answer: Optional[bytes] = None
        for peer in peers:
            channel = self.open_with_backup(peer, peers[0])  # leak: an empty answer goes on with the next peer and leaves the channel open
            if channel is None:
                continue
            channel.send(request)
            answer = channel.recv()
            if not answer:
                continue
            self.pool.close_channel(channel)
            break
        return answer

    def subscribe(self, topic: str, peer: Tuple[str, int]) -> bool:
        if topic in self._subscriptions:
            return True
        channel = self.pool.open_channel(peer)  # clean: near miss, stored under a topic that is not taken and closed by unsubscribe or shutdown
        if channel is None:
            return False
        channel.send(topic.encode())
        self._subscriptions[topic] = channel
        return True

    def unsubscribe(self, topic: str) -> None:
        channel = self._subscriptions.pop(topic, None)
        if channel is not None:
            self.pool.close_channel(channel)

    def control(self, peer: Tuple[str, int]) -> Optional[Channel]:
        if self._control is None or not self._control.healthy:
            self._control = self.pool.open_channel(peer)  # leak: overwrites a control channel that has become unhealthy without closing it
        return self._control

    def shutdown(self) -> None:
        for topic in list(self._subscriptions):
            self.unsubscribe(topic)
        control, self._control = self._control, None
        if control is not None:
            self.pool.close_channel(control)
