from __future__ import annotations

from typing import Callable, Optional

from .pages import HostPages, PageLease


class TransferFault(RuntimeError):
    pass


Mover = Callable[[bytes], bytes]


class Bounce:
    """A bounce buffer that may be the caller's own lease."""

    def __init__(self, pages: HostPages, nbytes: int, lease: Optional[PageLease] = None) -> None:
        self._pages = pages
        self._owned = lease is None
        self.lease = lease if lease is not None else pages.lease(nbytes, "bounce")  # clean: near miss, given up under the flag

    def close(self) -> None:
        if self._owned and self.lease is not None:
            self._pages.surrender(self.lease)
        self.lease = None

    def __enter__(self) -> "Bounce":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Staging:
    """Staging whose lease outlives it when detached."""

    def __init__(self, pages: HostPages, nbytes: int) -> None:
        self._pages = pages
        self._lease = pages.lease(nbytes, "staging")  # leak: an exit with a fault returns before surrender and detach does not happen
        self._detached = False

    @property
    def ok(self) -> bool:
        return self._lease is not None

    def fill(self, data: bytes) -> None:
        if self._lease is None:
            raise TransferFault("nothing staged")
        self._lease.data = data

    def detach(self) -> PageLease:
        assert self._lease is not None
        self._detached = True
        return self._lease

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._lease is None or self._detached:
            return False
        if exc_type is not None and issubclass(exc_type, TransferFault):
            self._lease.data = b""
            return True
        self._pages.surrender(self._lease)
        return False


def copy_out(pages: HostPages, payload: bytes, move: Mover, into: Optional[PageLease] = None) -> Optional[PageLease]:
    """Moves the payload to the host. With ``into`` the lease stays the caller's."""
    own = into is None
    lease = into if into is not None else pages.lease(len(payload), "out")  # clean: near miss, own decides who surrenders on a fault
    if lease is None:
        return None
    try:
        lease.data = move(payload)
    except TransferFault:
        if own:
            pages.surrender(lease)
        return None
    return lease


def copy_out_verified(pages: HostPages, payload: bytes, move: Mover, verify: bool) -> Optional[PageLease]:
    lease = pages.lease(len(payload), "verified")  # leak: a mismatch is surrendered only without verify
    if lease is None:
        return None
    lease.data = move(payload)
    matches = lease.data == payload
    if verify and not matches:
        return None
    if not matches:
        pages.surrender(lease)
        return None
    return lease
