from __future__ import annotations

import logging
import os
import queue
import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

logger = logging.getLogger("lmc.disk")


class QuotaExceeded(Exception):
    pass


@dataclass(eq=False)
class WriteTicket:
    ticket_id: str
    key: str
    nbytes: int


class DiskQuota:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed = 0
        self._open: dict[str, WriteTicket] = {}
        self._lock = threading.Lock()

    def reserve(self, key: str, nbytes: int) -> WriteTicket:
        with self._lock:
            pending = sum(t.nbytes for t in self._open.values())
            if self.committed + pending + nbytes > self.capacity:
                raise QuotaExceeded(key)
            ticket = WriteTicket(uuid.uuid4().hex, key, nbytes)
            self._open[ticket.ticket_id] = ticket
            return ticket

    def commit(self, ticket: WriteTicket) -> None:
        with self._lock:
            del self._open[ticket.ticket_id]
            self.committed += ticket.nbytes

    def abort(self, ticket: WriteTicket) -> None:
        with self._lock:
            self._open.pop(ticket.ticket_id, None)

    def reclaim(self, nbytes: int) -> None:
        with self._lock:
            self.committed -= nbytes


class KeyLocks:
    def __init__(self) -> None:
        self._held: set[str] = set()
        self._mutex = threading.Lock()

    def try_lock(self, key: str) -> bool:
        with self._mutex:
            if key in self._held:
                return False
            self._held.add(key)
            return True

    def unlock(self, key: str) -> None:
        with self._mutex:
            self._held.discard(key)


class DiskBackend:
    def __init__(self, root: Path, quota: DiskQuota, locks: KeyLocks) -> None:
        self.root = root
        self.quota = quota
        self.locks = locks
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._writes: queue.Queue[Optional[tuple[WriteTicket, bytes]]] = queue.Queue(maxsize=64)
        self._writer = threading.Thread(target=self._run, daemon=True)
        self._writer.start()

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.kv"

    def contains(self, key: str) -> bool:
        return key in self._sizes

    def put(self, key: str, data: bytes) -> bool:
        try:
            ticket = self.quota.reserve(key, len(data))  # leak: a key that is there already returns with the ticket open
        except QuotaExceeded:
            return False
        if self.contains(key):
            return True
        try:
            self._path(key).write_bytes(data)
        except OSError as e:
            logger.error("write of %s failed: %s", key, e)
            self.quota.abort(ticket)
            return False
        self.quota.commit(ticket)
        self._sizes[key] = len(data)
        return True

    def put_async(self, key: str, data: bytes) -> bool:
        if self.contains(key):
            return True
        try:
            ticket = self.quota.reserve(key, len(data))  # clean: near miss, goes through the queue to the writer, or is aborted when it is full
        except QuotaExceeded:
            return False
        try:
            self._writes.put_nowait((ticket, data))
        except queue.Full:
            self.quota.abort(ticket)
            return False
        return True

    def _run(self) -> None:
        while (item := self._writes.get()) is not None:
            ticket, data = item
            try:
                self._path(ticket.key).write_bytes(data)
            except OSError as e:
                logger.error("write of %s failed: %s", ticket.key, e)
                self.quota.abort(ticket)
                continue
            self.quota.commit(ticket)
            self._sizes[ticket.key] = len(data)

    def put_batch(self, items: dict[str, bytes]) -> int:
        tickets: list[WriteTicket] = []
        try:
            for key, data in items.items():
                tickets.append(self.quota.reserve(key, len(data)))  # leak: the tickets got before the quota ran out stay open
        except QuotaExceeded:
            return 0
        for ticket in tickets:
            self._path(ticket.key).write_bytes(items[ticket.key])
            self._sizes[ticket.key] = ticket.nbytes
            self.quota.commit(ticket)
        return len(tickets)

    def put_what_fits(self, items: dict[str, bytes]) -> int:
        tickets: list[WriteTicket] = []
        for key, data in items.items():
            if self.contains(key):
                continue
            try:
                tickets.append(self.quota.reserve(key, len(data)))  # clean: near miss, the break leads to the commits of what fitted
            except QuotaExceeded:
                break
        for ticket in tickets:
            self._path(ticket.key).write_bytes(items[ticket.key])
            self._sizes[ticket.key] = ticket.nbytes
            self.quota.commit(ticket)
        return len(tickets)

    def get(self, key: str) -> Optional[bytes]:
        if not self.locks.try_lock(key):  # leak: a missing file returns None with the key locked
            return None
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            self._sizes.pop(key, None)
            return None
        self.locks.unlock(key)
        return data

    def remove(self, key: str) -> bool:
        if not self.locks.try_lock(key):  # clean: near miss, the finally unlocks after either return
            return False
        try:
            size = self._sizes.pop(key, None)
            if size is None:
                return False
            self._path(key).unlink(missing_ok=True)
            self.quota.reclaim(size)
            return True
        finally:
            self.locks.unlock(key)

    def rename(self, old: str, new: str) -> bool:
        if not self.locks.try_lock(old):  # leak: not unlocked when the new key is busy
            return False
        if not self.locks.try_lock(new):  # clean: unlocked at the end with the old one
            return False
        self._path(old).rename(self._path(new))
        self._sizes[new] = self._sizes.pop(old)
        self.locks.unlock(new)
        self.locks.unlock(old)
        return True

    def link(self, old: str, new: str) -> bool:
        if not self.locks.try_lock(old):  # clean: near miss, unlocked too when the new key is busy
            return False
        if not self.locks.try_lock(new):  # clean: unlocked right after the link
            self.locks.unlock(old)
            return False
        os.link(self._path(old), self._path(new))
        self.locks.unlock(new)
        self.locks.unlock(old)
        return True

    def close(self) -> None:
        self._writes.put(None)
        self._writer.join()
