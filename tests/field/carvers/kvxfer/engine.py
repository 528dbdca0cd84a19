from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

from .buffers import TransferBuffer, TransferBufferPool
from .guards import BufferGuard, MultiGuard

logger = logging.getLogger(__name__)

Link = Callable[[str, bytes], bool]


class LinkDown(ConnectionError):
    pass


@dataclass
class SendTask:
    room: str
    buf: TransferBuffer
    length: int
    attempts: int = 0
    on_done: List[Callable[[str], None]] = field(default_factory=list)


class PrefillSender:
    def __init__(self, pool: TransferBufferPool, link: Link) -> None:
        self.pool = pool
        self.link = link
        self.queue: List[SendTask] = []

    def enqueue(self, room: str, payload: bytes) -> bool:
        buf = self.pool.lease()  # clean: near miss, the task carries it until pump gives it up
        if buf is None:
            return False
        buf.data[: len(payload)] = payload
        self.queue.append(SendTask(room, buf, len(payload)))
        return True

    def enqueue_filled(self, room: str, payload: bytes) -> bool:
        buf = self.pool.lease_for(payload)  # leak: a room that is queued already returns True without give_up
        if buf is None:
            return False
        if any(t.room == room for t in self.queue):
            return True
        self.queue.append(SendTask(room, buf, len(payload)))
        return True

    def pump(self, max_attempts: int = 3) -> int:
        sent = 0
        retry: List[SendTask] = []
        while self.queue:
            task = self.queue.pop(0)
            task.attempts += 1
            if not self.link(task.room, bytes(task.buf.data[: task.length])) and task.attempts < max_attempts:
                retry.append(task)
                continue
            for callback in task.on_done:
                callback(task.room)
            self.pool.give_up(task.buf)
            sent += 1
        self.queue = retry
        return sent

    def send_now(self, room: str, payload: bytes) -> bool:
        with BufferGuard(self.pool) as guard:  # clean: near miss, detached into a task or given up by the guard
            if guard.buf is None:
                return False
            guard.buf.data[: len(payload)] = payload
            if self.link(room, payload):
                return True
            self.queue.append(SendTask(room, guard.detach(), len(payload), attempts=1))
        return False

    def send_best_effort(self, room: str, payload: bytes) -> bool:
        buf = self.pool.lease()  # leak: a link that refuses returns False without give_up
        if buf is None:
            return False
        buf.data[: len(payload)] = payload
        if not self.link(room, bytes(buf.data[: len(payload)])):
            return False
        self.pool.give_up(buf)
        return True

    def send_striped(self, room: str, payload: bytes, stripes: int) -> int:
        with MultiGuard(self.pool, stripes, minimum=2) as bufs:  # clean: context manager, its own fault is noted there
            if not bufs:
                return 0
            step = -(-len(payload) // len(bufs))
            for i, buf in enumerate(bufs):
                part = payload[i * step:(i + 1) * step]
                buf.data[: len(part)] = part
                self.link(room, part)
            return len(bufs)

    def send_with_failover(self, room: str, payload: bytes, links: List[Link]) -> Optional[int]:
        for index, link in enumerate(links):
            buf = self.pool.lease()  # clean: near miss, finally gives it up before the next link is tried
            if buf is None:
                return None
            try:
                buf.data[: len(payload)] = payload
                if link(room, payload):
                    return index
            except LinkDown:
                logger.warning("link %d is down", index)
            finally:
                self.pool.give_up(buf)
        return None


class DecodeReceiver:
    def __init__(self, pool: TransferBufferPool) -> None:
        self.pool = pool
        self.rooms: Dict[str, TransferBuffer] = {}

    def post(self, room: str) -> bool:
        self.rooms[room] = self.pool.lease()  # leak: posting a room twice overwrites its buffer
        return self.rooms[room] is not None

    def collect(self, room: str, length: int) -> Optional[bytes]:
        buf = self.rooms.pop(room, None)
        if buf is None:
            return None
        data = bytes(buf.data[:length])
        self.pool.give_up(buf)
        return data

    def close(self) -> None:
        for buf in self.rooms.values():
            if buf is not None:
                self.pool.give_up(buf)
        self.rooms.clear()
