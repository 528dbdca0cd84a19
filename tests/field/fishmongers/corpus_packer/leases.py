"""Which worker packs which shard: one lock file a shard on the shared disk."""
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


class LeaseLost(RuntimeError):
    """Somebody removed the lock file while the shard was being packed."""


@dataclass(eq=False)
class ShardLease:
    shard: Path
    lock: Path
    fd: int

    def check(self) -> None:
        if not self.lock.exists():
            raise LeaseLost(str(self.shard))


class LeaseBoard:
    def __init__(self, root: Path, owner: str) -> None:
        self._root = root
        self._owner = owner
        self.held = 0

    def _try(self, shard: Path) -> ShardLease | None:
        lock = shard.with_suffix(".lock")
        try:
            fd = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # leak: a shard that was done meanwhile returns None, with the lock file there and open
        except FileExistsError:
            return None
        if shard.with_suffix(".done").exists():
            return None
        os.write(fd, self._owner.encode())
        self.held += 1
        return ShardLease(shard, lock, fd)

    def next(self) -> ShardLease | None:
        for shard in sorted(self._root.glob("*.tok")):
            if shard.with_suffix(".done").exists():
                continue
            lease = self._try(shard)  # clean: returned
            if lease is not None:
                return lease
        return None

    def take(self, shard: Path) -> ShardLease:
        lease = self._try(shard)  # clean: raises only when there is none
        if lease is None:
            raise LeaseLost(str(shard))
        return lease

    def _let_go(self, lease: ShardLease) -> None:
        os.close(lease.fd)
        lease.lock.unlink(missing_ok=True)
        self.held -= 1

    def finish(self, lease: ShardLease) -> None:
        lease.shard.with_suffix(".done").touch()
        self._let_go(lease)

    def abandon(self, lease: ShardLease) -> None:
        log.info("abandoning %s", lease.shard)
        self._let_go(lease)

    @contextlib.contextmanager
    def holding(self, shard: Path) -> Iterator[ShardLease]:
        lease = self.take(shard)  # clean: finally
        try:
            yield lease
        finally:
            self._let_go(lease)
