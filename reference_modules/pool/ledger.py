"""The pool's books: which leases stand, how many bytes they hold, and what came back meanwhile."""

from __future__ import annotations

import torch

from reference_modules.pool.blocks import Signal
from reference_modules.pool.leases import DetailedLease, Lease, LeaseTable, call_site
from reference_modules.pool.statistics import Counters, PoolStats, read
from reference_modules.pool.stores import Store


class Ledger:
    """Leases, counters and store kept in step; every method runs under the pool's lock."""

    def __init__(self, store: Store, *, tracking: bool) -> None:
        self.leases = LeaseTable()
        self.counters = Counters()
        self.store = store
        self.tracking = tracking
        self.open = True

    def hold(self, tensor: torch.Tensor, nbytes: int, signal: Signal | None, site: str | None) -> None:
        """Enter a lease on this tensor: over a block where there is a signal, else in plain memory.

        Those below the threshold are entered by `TensorPool.allocate` itself.
        """
        counters = self.counters
        if self.leases.died:  # only now, after the tensor was made: one that died before may have had its id
            self.bury()
        lease = DetailedLease(tensor, self.leases.bury_later)
        lease.signal = signal
        lease.site = site
        lease.key = key = id(tensor)
        lease.nbytes = nbytes
        self.leases.standing[key] = lease
        counters.in_use += nbytes
        if signal is not None:
            counters.in_blocks += nbytes

    def release(self, tensor: torch.Tensor) -> bool:
        """End the lease on exactly this tensor; False where there is none."""
        leases, counters = self.leases, self.counters
        if leases.died:
            self.bury()
        lease = leases.standing.pop(id(tensor), None)
        if lease is None:
            return False
        self._note_peaks()
        counters.in_use -= lease.nbytes
        self._end(lease)
        if self.tracking:
            leases.released[lease.key] = (lease, call_site())
        elif lease.signal is not None:
            leases.released[lease.key] = (lease, None)
        return True

    def bury(self) -> None:
        """Count the leases whose tensor died unreleased as abandoned."""
        counters = self.counters
        self._note_peaks()
        for lease in self.leases.bury():
            counters.abandoned += 1
            counters.in_use -= lease.nbytes
            self._end(lease)
            self.leases.remember_abandoned(lease)

    def settle(self) -> None:
        """Take in everything that has died since the last call; asked first by all that gives memory back."""
        self._note_peaks()
        if self.leases.died:
            self.bury()
        if self.open:
            self.store.settle()

    def close(self) -> None:
        """Forget the memory; the leases stay known, so that they can still be released."""
        self.settle()
        self.open = False
        self.store.abandon()

    def stats(self) -> PoolStats:
        """The figures of this moment."""
        self.settle()
        return read(self.counters, self.store, len(self.leases.standing))

    def _note_peaks(self) -> None:
        """Called before a figure falls and before one is read: between such calls figures only rise, so no
        peak is missed, and an allocation need not look.
        """
        counters = self.counters
        if counters.in_use > counters.peak_in_use:
            counters.peak_in_use = counters.in_use
        reserved = self.store.reserved + counters.in_use - counters.in_blocks
        if reserved > counters.peak_reserved:
            counters.peak_reserved = reserved

    def _end(self, lease: Lease) -> None:
        if lease.signal is None:
            return
        self.counters.in_blocks -= lease.nbytes
        if self.open:
            self.store.part(lease.signal)
