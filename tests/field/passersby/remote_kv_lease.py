"""Client of a remote KV store: values are read under a lease that must be ended."""
from __future__ import annotations

import enum
import logging
import random
import time
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Optional, Set, Tuple, Type, TypeVar

import torch

logger = logging.getLogger("remote_kv")
T = TypeVar("T")


class LeaseLost(Exception):
    """The server has dropped the key."""


class Mode(enum.Enum):
    SHARED = "s"
    EXCLUSIVE = "x"


class LeaseServer:
    def __init__(self) -> None:
        self.values: Dict[str, torch.Tensor] = {}
        self.shared: Dict[str, int] = {}
        self.exclusive: Set[str] = set()


@dataclass
class Lease:
    server: LeaseServer
    key: str
    mode: Mode
    ended: bool = False

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self.mode is Mode.EXCLUSIVE:
            self.server.exclusive.discard(self.key)
        else:
            self.server.shared[self.key] -= 1

    def value(self) -> torch.Tensor:
        if self.key not in self.server.values:
            raise LeaseLost(self.key)
        return self.server.values[self.key]

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, et: Optional[Type[BaseException]], ev: object, tb: object) -> None:
        self.end()


class RemoteKV:
    def __init__(self, server: LeaseServer, tries: int = 5) -> None:
        self.server = server
        self.tries = tries
        self.held: Dict[str, Lease] = {}

    def begin_lease(self, key: str, mode: Mode = Mode.SHARED) -> Optional[Lease]:
        if key in self.server.exclusive:
            return None
        if mode is Mode.EXCLUSIVE:
            if self.server.shared.get(key, 0):
                return None
            self.server.exclusive.add(key)
        else:
            self.server.shared[key] = self.server.shared.get(key, 0) + 1
        return Lease(self.server, key, mode)

    def begin_retry(self, key: str, mode: Mode = Mode.SHARED) -> Lease:
        for i in range(self.tries):
            lease = self.begin_lease(key, mode)  # clean: near miss, a failed try is None, a good one is returned
            if lease is not None:
                return lease
            time.sleep(random.random() * 0.01 * (i + 1))
        raise TimeoutError(key)

    def get(self, key: str) -> torch.Tensor:
        with self.begin_retry(key) as lease:  # clean: with statement
            return lease.value().clone()

    def get_if_newer(self, key: str, than: int) -> Optional[torch.Tensor]:
        lease = self.begin_retry(key)  # leak: an old value returns None and the lease runs on
        v = lease.value()
        if int(v[0]) <= than:
            return None
        out = v.clone()
        lease.end()
        return out

    def put(self, key: str, value: torch.Tensor) -> bool:
        lease = self.begin_lease(key, Mode.EXCLUSIVE)  # clean: near miss, None holds nothing, else ended
        if lease is None:
            return False
        self.server.values[key] = value
        lease.end()
        return True

    def put_many(self, items: Dict[str, torch.Tensor]) -> bool:
        leases: List[Lease] = []
        for key in items:
            lease = self.begin_lease(key, Mode.EXCLUSIVE)  # leak: one refused key returns False while the earlier ones stay leased
            if lease is None:
                logger.info("put_many: %s is busy", key)
                return False
            leases.append(lease)
        for lease in leases:
            self.server.values[lease.key] = items[lease.key]
            lease.end()
        return True

    def move(self, src: str, dst: str) -> bool:
        a = self.begin_lease(src, Mode.EXCLUSIVE)  # clean: near miss, every way out after it has been got ends it
        if a is None:
            return False
        b = self.begin_lease(dst, Mode.EXCLUSIVE)  # clean: None holds nothing, else ended
        if b is None:
            a.end()
            return False
        self.server.values[dst] = self.server.values.pop(src)
        a.end()
        b.end()
        return True

    def compare_and_set(self, key: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        for _ in range(self.tries):
            lease = self.begin_lease(key, Mode.EXCLUSIVE)  # leak: after LeaseLost the loop goes on with another lease
            if lease is None:
                continue
            try:
                if not torch.equal(lease.value(), old):
                    lease.end()
                    return False
                self.server.values[key] = new
                lease.end()
                return True
            except LeaseLost:
                logger.warning("lease on %s lost, trying again", key)
        return False

    def hold(self, key: str) -> torch.Tensor:
        if key not in self.held:
            self.held[key] = self.begin_retry(key)  # clean: near miss, held once per key, unhold() and close() end it
        return self.held[key].value()

    def unhold(self, key: str) -> None:
        lease = self.held.pop(key, None)
        if lease:
            lease.end()

    def upgrade(self, key: str) -> bool:
        self.unhold(key)
        lease = self.begin_lease(key, Mode.EXCLUSIVE)  # clean: near miss, stored in held where nothing is now, else None
        if lease is None:
            return False
        self.held[key] = lease
        return True

    def rehold(self, keys: Iterable[str]) -> None:
        for k in keys:
            self.held[k] = self.begin_retry(k)  # leak: a lease already held for the key is overwritten without an end

    def transform(self, key: str, fn: Callable[[torch.Tensor], T]) -> Tuple[str, T]:
        lease = self.begin_retry(key)  # clean: ended in finally
        try:
            return key, fn(lease.value())
        finally:
            lease.end()

    def exists(self, key: str) -> bool:
        return bool(self.begin_lease(key)) and key in self.server.values  # leak: the lease only serves as truth value

    def close(self) -> None:
        while self.held:
            self.held.popitem()[1].end()
