"""The fuzz's model: every pooled value beside a plain twin that underwent the same operations, and a count of
what is leased.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from reference_modules.pool import PoolError, TensorPool


@dataclass
class LeaseModel:
    """What a correct pool must know of one lease, found out without asking it."""

    nbytes: int
    released: bool = False
    died: list[object] = field(default_factory=list)
    watch: object = None


@dataclass
class Pair:
    """A pooled value (a lease or an alias of one) and its twin."""

    pooled: torch.Tensor | np.ndarray
    plain: torch.Tensor | np.ndarray
    lease: LeaseModel | None = None
    exported: bool = False
    """A dlpack alias was made of it. That holds the tensor, not the storage: re-pointing it then is undefined
    in torch itself.
    """


class Model:
    """Applies each operation to both worlds; `check` compares them."""

    def __init__(self, pool: TensorPool) -> None:
        self.pool = pool
        self.other = TensorPool(threshold_mb=0, name="other")
        self.pairs: list[Pair] = []
        self.leases: list[LeaseModel] = []
        self.graphs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.refused = 0
        self._written = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> None:
        try:
            pooled = self.pool.allocate(shape, dtype, zero=zero)
        except PoolError:
            self.refused += 1
            return
        assert pooled.shape == torch.Size(shape)
        assert pooled.dtype == dtype
        assert pooled.is_contiguous()
        assert not (pooled.requires_grad or pooled.is_inference() or pooled._is_view())
        with torch.inference_mode(False):
            plain = torch.zeros(shape, dtype=dtype)
        lease = LeaseModel(plain.numel() * plain.element_size())
        lease.watch = weakref.ref(pooled, lease.died.append)
        self.leases.append(lease)
        pair = Pair(pooled, plain, lease)
        if not zero:
            self._written = self._written % 100 + 1
            pooled.fill_(self._written)
            plain.fill_(self._written)
        self.pairs.append(pair)

    def release(self, at: int) -> None:
        """Deallocate a lease; one released before, or an alias, must be refused."""
        pair = self._at(at)
        if pair is None or not isinstance(pair.pooled, torch.Tensor):
            return
        if pair.lease is None or pair.lease.released:
            refused(lambda: self.pool.deallocate(pair.pooled))
        else:
            self.pool.deallocate(pair.pooled)
            pair.lease.released = True

    def release_foreign(self) -> None:
        refused(lambda: self.pool.deallocate(torch.zeros(3)))
        theirs = self.other.allocate((3,))
        refused(lambda: self.pool.deallocate(theirs))
        self.other.deallocate(theirs)

    def drop(self, at: int) -> None:
        if self.pairs:
            del self.pairs[at % len(self.pairs)]

    def drop_in_cycle(self, at: int) -> None:
        if self.pairs:
            knot = [self.pairs.pop(at % len(self.pairs))]
            knot.append(knot)  # type: ignore[arg-type]
            del knot
            gc.collect(0)

    def alias(self, at: int, how: Callable[[torch.Tensor], torch.Tensor | np.ndarray], exports: bool) -> None:
        pair = self._tensors(at)
        if pair is None:
            return
        made = both(lambda t: how(t), pair)
        if made is not None:
            pair.exported |= exports
            self.pairs.append(Pair(*made))

    def change(self, at: int, how: Callable[[torch.Tensor], object], re_points: bool) -> None:
        pair = self._tensors(at)
        if pair is not None and not (re_points and pair.exported):
            both(how, pair)

    def start_graph(self, at: int, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """A graph that saves the pooled tensor, differentiated later, when that may long be released."""
        pair = self._tensors(at)
        if pair is None or not pair.plain.is_floating_point():
            return
        weights = [
            torch.full(pair.plain.shape, 1.5, dtype=pair.plain.dtype).requires_grad_() for _ in range(2)
        ]
        with torch.enable_grad():
            made = both(lambda t: how(t, weights[t is pair.plain]), pair)
        if made is not None:
            self.graphs.append((*made, *weights))  # type: ignore[arg-type]

    def finish_graph(self, at: int) -> None:
        if not self.graphs:
            return
        pooled, plain, pooled_weight, plain_weight = self.graphs.pop(at % len(self.graphs))
        if not pooled.requires_grad:
            return
        if both(lambda t: t.sum().backward(), Pair(pooled, plain)) is not None:
            assert same(pooled_weight.grad, plain_weight.grad)

    def in_thread(self, work: Callable[[], None]) -> None:
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def check(self) -> None:
        """Every live value is its twin's, and the pool's figures are the model's."""
        for pair in self.pairs:
            assert same(pair.pooled, pair.plain)
        standing = [lease for lease in self.leases if not lease.released]
        live = [lease for lease in standing if not lease.died]
        stats = self.pool.stats()
        assert stats.bytes_in_use == sum(lease.nbytes for lease in live)
        assert stats.leases == len(standing)
        assert stats.abandoned == len(standing) - len(live)
        assert stats.refused == self.refused
        assert stats.peak_bytes_in_use >= stats.bytes_in_use
        assert stats.peak_bytes_reserved >= stats.bytes_reserved >= 0
        assert stats.waiting >= 0
        limit = self.pool._settings.max_bytes
        assert limit is None or stats.bytes_reserved <= limit

    def close(self) -> None:
        owed = any(not lease.released for lease in self.leases)
        if owed:
            refused(self.pool.close)
        else:
            self.pool.close()
        noise = [torch.full((64,), 77.0) for _ in range(4)]
        for pair in self.pairs:
            assert same(pair.pooled, pair.plain)
        del noise
        while self.graphs:
            self.finish_graph(0)
        self.other.close()

    def _at(self, at: int) -> Pair | None:
        return self.pairs[at % len(self.pairs)] if self.pairs else None

    def _tensors(self, at: int) -> Pair | None:
        pair = self._at(at)
        return pair if pair is not None and isinstance(pair.pooled, torch.Tensor) else None


def both(how, pair: Pair):  # type: ignore[no-untyped-def]
    """The operation in both worlds: two results, or None where both refuse in the same way."""
    results, errors = [], []
    for value in (pair.pooled, pair.plain):
        try:
            results.append(how(value))
        except (RuntimeError, TypeError, BufferError) as error:
            errors.append(type(error))
    assert not errors or (len(errors) == 2 and errors[0] is errors[1]), (errors, len(results))
    return None if errors else tuple(results)


def refused(work: Callable[[], object]) -> None:
    try:
        work()
    except PoolError:
        return
    raise AssertionError("the pool accepted what it must refuse")


def same(one: object, two: object) -> bool:
    if one is None or two is None:
        return one is two
    a = one if isinstance(one, torch.Tensor) else torch.from_numpy(one)
    b = two if isinstance(two, torch.Tensor) else torch.from_numpy(two)
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach()
    return torch.equal(a, b) or torch.equal(a.nan_to_num(nan=-7), b.nan_to_num(nan=-7))
