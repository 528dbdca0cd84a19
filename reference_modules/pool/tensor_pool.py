"""TensorPool: allocate and deallocate tensors whose memory is used again, without ever corrupting a value
that can still be read.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from types import TracebackType
from typing import Any

import torch

from reference_modules.pool import calibration, complaints, living, threshold
from reference_modules.pool.background import Background
from reference_modules.pool.errors import PoolError
from reference_modules.pool.fragmentation import Fragmentation, fragmentation
from reference_modules.pool.lease_context import LeaseContext
from reference_modules.pool.leases import Lease, LeaseTable, call_site
from reference_modules.pool.ledger import Ledger
from reference_modules.pool.policy import Policy
from reference_modules.pool.requests import Shape, checked_bytes, checked_device, checked_shape
from reference_modules.pool.settings import FaultHook, Settings, resolve_backend, resolve_device
from reference_modules.pool.statistics import PoolStats
from reference_modules.pool.stores import Store, make_store
from reference_modules.pool.uncleared import poison

Device = str | int | torch.device
_F32 = torch.float32
_empty, _zeros, _in_inference = torch.empty, torch.zeros, torch.is_inference_mode_enabled


class TensorPool:
    """A pool of tensors on one device; every `allocate` owes one `deallocate`. docs/pool.md tells the whole
    story.

    All methods may be called from any thread. A lease that nobody gives back costs no memory once its tensor
    has died, but stays counted as abandoned and is named by `close`.
    """

    def __init__(
        self,
        device: Device = "cpu",
        *,
        name: str | None = None,
        max_bytes: int | None = None,
        threshold_mb: float | None = None,
        backend: str = "auto",
        tracking: bool = False,
        debug: bool = False,
        fault_hook: FaultHook | None = None,
        store: Store | None = None,
    ) -> None:
        """`store` replaces the one that `backend` names (pinned memory, simulations)."""
        home = resolve_device(device)
        name = name or f"{home}-{id(self):x}"
        backend = resolve_backend(backend, home, name)
        self._settings = Settings(home, name, max_bytes, threshold_mb, backend, tracking, debug)
        self.device = home
        self.name = name
        self._fault_hook = fault_hook
        self.lock = threading.RLock()
        """Reentrant, because the collector may run a finaliser that releases a lease while this thread is
        inside the pool.
        """
        self._store = store or make_store(backend, home)
        self._ledger = Ledger(self._store, tracking=tracking)
        self._policy = Policy(self._settings, self._ledger)
        self._background: Background | None = None
        self.set_threshold(threshold.default(home) if threshold_mb is None else threshold_mb)
        living.pools.add(self)

    def allocate(
        self, shape: Shape, dtype: torch.dtype = _F32, device: Device | None = None, *, zero: bool = False
    ) -> torch.Tensor:
        """A fresh contiguous tensor, uncleared unless `zero`. Give it back with `deallocate`."""
        try:
            nbytes = prod(shape) * dtype.itemsize  # type: ignore[arg-type]
        except (TypeError, AttributeError):  # an int, or wrong: decided with care below
            nbytes = self._plain_below
        if nbytes >= self._plain_below or _in_inference() or not (device is None or device == self.device):
            return self.allocate_above(self._threshold, shape, dtype, device, zero=zero)
        try:
            tensor = (_zeros if zero else _empty)(shape, dtype=dtype, device=self.device)
        except (RuntimeError, TypeError):
            checked_shape(shape, self.name)
            raise
        with self.lock:  # what the pool costs where it does not help, hence not a call
            leases, counters = self._ledger.leases, self._ledger.counters
            if leases.died:  # only now, after the tensor was made: one that died before may have had its id
                self._ledger.bury()
            lease = Lease(tensor, leases.bury_later)
            lease.key = key = id(tensor)
            lease.nbytes = nbytes
            leases.standing[key] = lease
            counters.bypassed += 1
            counters.in_use += nbytes
        return tensor

    def allocate_above(
        self,
        threshold_bytes: int,
        shape: Shape,
        dtype: torch.dtype = _F32,
        device: Device | None = None,
        *,
        zero: bool = False,
    ) -> torch.Tensor:
        """`allocate` with the caller's threshold in place of the pool's (a module knows its sizes better)."""
        if _in_inference():  # its tensors could not be written in place outside of it
            with torch.inference_mode(False):
                return self.allocate_above(threshold_bytes, shape, dtype, device, zero=zero)
        sizes = checked_shape(shape, self.name)
        nbytes = checked_bytes(sizes, dtype, self.name)
        if device is not None:
            checked_device(device, self.device, self.name)
        if self._fault_hook is not None:
            self._fault_hook(nbytes)
        settings, ledger = self._settings, self._ledger
        site = call_site() if settings.tracking else None
        with self.lock:
            if not ledger.open:
                raise complaints.closed(self.name)
            ledger.settle()
            tensor, signal, cleared = self._policy.obtain(
                sizes, dtype, nbytes, nbytes >= threshold_bytes, zero
            )
            ledger.hold(tensor, nbytes, signal, site)
        if (zero and not cleared) or (settings.debug and not zero):
            self._fill(tensor, zero)
        return tensor

    def deallocate(self, tensor: torch.Tensor) -> None:
        """End the lease. The memory is used again when nothing, `tensor` included, refers to its storage."""
        with self.lock:
            if not self._ledger.release(tensor):
                raise complaints.wrong_release(self, tensor, living.pools)

    def lease(
        self, shape: Shape, dtype: torch.dtype = _F32, device: Device | None = None, *, zero: bool = False
    ) -> AbstractContextManager[torch.Tensor]:
        """A tensor for the length of a `with` block, given back on every way out."""
        return LeaseContext(self, shape, dtype, device, zero)

    def stats(self) -> PoolStats:
        """The pool's figures at this moment."""
        with self.lock:
            return self._ledger.stats()

    def fragmentation(self) -> Fragmentation:
        """Four numbers over the pool's life; fragmentation.py says what each means."""
        with self.lock:
            self._ledger.settle()
            counters, (requested, served) = self._ledger.counters, self._store.fit()
            return fragmentation(
                requested=requested,
                served=served,
                peak_in_use=counters.peak_in_use,
                peak_reserved=counters.peak_reserved,
                refusals=counters.refused_while_free,
            )

    def efficiency(self) -> list[dict[str, float]]:
        """Hits, misses and waste of every size class that served a lease, by size."""
        with self.lock:
            self._ledger.settle()
            return self._store.report()

    def outstanding(self) -> dict[str, int]:
        """How many leases stand, by the file and line that made them (tracking mode; else under one unknown
        place).
        """
        with self.lock:
            self._ledger.settle()
            sites = Counter(lease.site or complaints.UNTRACKED for lease in self.leases.standing.values())
            return dict(sites + self.leases.abandoned_sites)

    def set_threshold(self, threshold_mb: float) -> None:
        """From now on smaller allocations are left to plain torch memory."""
        settings = self._settings
        self._threshold = int(threshold_mb * (1 << 20))
        plain = settings.max_bytes is None and not (settings.tracking or settings.debug)
        below = sys.maxsize if self._store.adds_nothing else self._threshold
        self._plain_below = below if plain and self._fault_hook is None and not self.closed else 0

    def calibrate(self) -> float:
        """Measure from which size reuse wins on this machine; pools without a threshold of their own take it.
        In MB.
        """
        if self.device.type == "cpu":
            threshold.remember(self.device, calibration.measure())
        for pool in list(living.pools):
            if pool.device.type == self.device.type and pool._settings.threshold_mb is None:
                pool.set_threshold(threshold.default(pool.device))
        return self._threshold / (1 << 20)

    def trim(self, keep_bytes: int = 0) -> int:
        """Give back idle blocks, the longest idle first, down to `keep_bytes`; returns what went."""
        with self.lock:
            self._ledger.settle()
            return self._store.evict(self._store.idle_bytes - keep_bytes)

    def give_back_step(self, idle_seconds: float, most_bytes: int) -> int:
        """One step of giving back: blocks idle for longer, at most about `most_bytes`; everything idle under
        memory pressure.
        """
        with self.lock:
            self._ledger.settle()
            gone = self._store.evict_older(time.monotonic() - idle_seconds, most_bytes)
            return gone + self._store.evict(self._store.under_pressure())

    def start_giving_back(
        self, *, idle_seconds: float = 30.0, every_seconds: float = 5.0, step_bytes: int = 256 << 20
    ) -> None:
        """Let a daemon thread take `give_back_step` regularly; it ends with the pool, `close` or
        `stop_giving_back`.
        """
        self.stop_giving_back()
        self._background = Background(self, idle_seconds, every_seconds, step_bytes)

    def stop_giving_back(self) -> None:
        """End the background thread, if there is one."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()

    def close(self) -> None:
        """Give every block back and serve no more. PoolError, afterwards, names leases that were never given
        back.

        Tensors that are still referred to stay valid, and their leases may still be released.
        """
        self.stop_giving_back()
        with self.lock:
            if self.closed:
                return
            self._plain_below = 0
            self._ledger.close()
            standing, abandoned = list(self.leases.standing.values()), self._ledger.counters.abandoned
            if standing or abandoned:
                raise complaints.still_held(self.name, standing, self.leases.abandoned_sites, abandoned)

    @property
    def leases(self) -> LeaseTable:
        """The table of leases, for errors that must name another pool's."""
        return self._ledger.leases

    @property
    def fault_hook(self) -> FaultHook | None:
        """Called with the bytes of every allocation before anything is held; what it raises, callers get."""
        return self._fault_hook

    @fault_hook.setter
    def fault_hook(self, hook: FaultHook | None) -> None:
        self._fault_hook = hook
        self.set_threshold(self._threshold / (1 << 20))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._ledger.open

    def reset_after_fork(self) -> None:
        """In a forked child: the tables are whole (living.py), the lock's owner and the background thread are
        not here.
        """
        self.lock = threading.RLock()
        self._background = None
        self._store.reset_after_fork()
        self.set_threshold(self._threshold / (1 << 20))

    def __enter__(self) -> TensorPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PoolError as complaint:
            if error is None:
                raise
            error.add_note(str(complaint))  # the first error is the story; ours must not replace it

    def __reduce__(self) -> tuple[Any, ...]:
        """An empty pool with these settings, for pickle and copy; a fault hook stays behind."""
        return partial(TensorPool, **vars(self._settings)), ()

    def __repr__(self) -> str:
        return f"TensorPool({str(self.device)!r}, name={self.name!r}, backend={self._settings.backend!r})"

    def _fill(self, tensor: torch.Tensor, zero: bool) -> None:
        try:
            with torch.no_grad():
                tensor.zero_() if zero else poison(tensor)
        except BaseException:
            self.deallocate(tensor)
            raise
