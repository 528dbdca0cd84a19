"""Devices are lent by memory: a lease is (device, megabytes)."""
from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional


@dataclass(frozen=True)
class Lease:
    device: int
    mb: int
    user: str = ""


class DeviceBook:
    def __init__(self, mb_per_device: List[int]):
        self.left = list(mb_per_device)
        self.cond = threading.Condition()

    def sign_out(self, mb: int, user: str = "") -> Optional[Lease]:
        with self.cond:
            best = max(range(len(self.left)), key=self.left.__getitem__)
            if self.left[best] < mb:
                return None
            self.left[best] -= mb
            return Lease(best, mb, user)

    def sign_in(self, lease: Lease) -> None:
        with self.cond:
            self.left[lease.device] += lease.mb
            self.cond.notify_all()

    def sign_out_on(self, device: int, mb: int) -> Optional[Lease]:
        """A lease on a given device, for models that must share its cache."""
        lease = self.sign_out(mb)  # leak: a lease on another device is dropped with its memory
        if lease is None or lease.device != device:
            return None
        return lease


class FairBook:
    """Limits what one user may hold of the book below."""

    def __init__(self, book: DeviceBook, share_mb: int):
        self.book = book
        self.share_mb = share_mb
        self.by_user: Dict[str, int] = {}

    def sign_out(self, mb: int, user: str) -> Optional[Lease]:
        held = self.by_user.get(user, 0)
        if held + mb > self.share_mb:
            return None
        lease = self.book.sign_out(mb, user)  # clean: near miss, counted for the user only when there is one, and returned
        if lease is not None:
            self.by_user[user] = held + mb
        return lease

    def sign_in(self, lease: Lease) -> None:
        self.by_user[lease.user] -= lease.mb
        self.book.sign_in(lease)

    @contextlib.contextmanager
    def signed_out(self, mb: int, user: str) -> Iterator[Lease]:
        lease = self.sign_out(mb, user)  # clean: signed in in finally
        if lease is None:
            raise MemoryError(f"{user}: {mb} MB")
        try:
            yield lease
        finally:
            self.sign_in(lease)

    def upgrade(self, lease: Lease, mb: int) -> Optional[Lease]:
        """Trades a lease for a bigger one; None leaves the old lease as it was."""
        bigger = self.sign_out(mb, lease.user)  # leak: one on another device is refused and not signed in
        if bigger is None:
            return None
        if bigger.device != lease.device:
            return None
        self.sign_in(lease)
        return bigger
