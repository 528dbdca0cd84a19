"""Communicators shared by the parallel dimensions of a job (tensor, pipeline, data, expert, context).

Creating a communicator is a collective and costs hundreds of megabytes, so those with the same ranks are
shared and counted. CommRegistry.obtain raises the count, relinquish lowers it, the last one destroys.
"""
from __future__ import annotations

import abc
import itertools
import logging
import threading
from typing import Callable

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class Comm:
    def __init__(self, ranks: tuple[int, ...], backend: str):
        self.ranks = ranks
        self.backend = backend
        self.pg = dist.new_group(list(ranks), backend=backend)
        self.refs = 0

    @property
    def size(self) -> int:
        return len(self.ranks)


class CommRegistry:
    def __init__(self) -> None:
        self._by_key: dict[tuple, Comm] = {}
        self._mu = threading.RLock()

    def obtain(self, ranks, backend: str = "nccl") -> Comm:
        key = (tuple(sorted(ranks)), backend)
        with self._mu:
            comm = self._by_key.get(key)
            if comm is None:
                comm = self._by_key[key] = Comm(*key)
            comm.refs += 1
            return comm

    def relinquish(self, comm: Comm) -> None:
        with self._mu:
            comm.refs -= 1
            if comm.refs == 0:
                del self._by_key[(comm.ranks, comm.backend)]
                dist.destroy_process_group(comm.pg)


REGISTRY = CommRegistry()


class ParallelDim(abc.ABC):
    """One dimension of the device mesh, open between setup() and teardown()."""

    def __init__(self, name: str, ranks: list[int], registry: CommRegistry = REGISTRY):
        self.name = name
        self.ranks = ranks
        self.registry = registry
        self.comm: Comm | None = None

    def setup(self) -> None:
        self.comm = self.registry.obtain(self.ranks)  # clean: teardown relinquishes it

    def teardown(self) -> None:
        if self.comm is not None:
            self.registry.relinquish(self.comm)
            self.comm = None

    @abc.abstractmethod
    def sync(self, t: torch.Tensor) -> torch.Tensor: ...


class TensorDim(ParallelDim):
    def sync(self, t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=self.comm.pg)
        return t


class DataDim(ParallelDim):
    """Has a second communicator over gloo for metrics."""

    def setup(self) -> None:
        super().setup()
        self.side = self.registry.obtain(self.ranks, "gloo")  # clean: near miss, the overridden teardown

    def teardown(self) -> None:
        self.registry.relinquish(self.side)
        super().teardown()

    def sync(self, t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, op=dist.ReduceOp.AVG, group=self.comm.pg)
        return t

    def metrics(self, t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=self.side.pg)
        return t


class ExpertDim(ParallelDim):
    """Shards experts over `width` ranks and replicates over the rest."""

    def __init__(self, name: str, ranks: list[int], width: int, registry: CommRegistry = REGISTRY):
        super().__init__(name, ranks, registry)
        self.width = width
        self.inner: Comm | None = None
        self.replicas: list[Comm] = []

    def setup(self) -> None:
        super().setup()
        me = dist.get_rank()
        at = self.ranks.index(me) // self.width
        near = self.ranks[at * self.width : (at + 1) * self.width]
        self.inner = self.registry.obtain(near)  # clean: teardown relinquishes it
        for k in range(self.width):
            far = self.registry.obtain(self.ranks[k :: self.width])  # leak: teardown only clears the list
            self.replicas.append(far)

    def teardown(self) -> None:
        if self.inner is not None:
            self.registry.relinquish(self.inner)
            self.inner = None
        self.replicas.clear()
        super().teardown()

    def sync(self, t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=self.inner.pg)
        return t


class ContextDim(ParallelDim):
    def setup(self) -> None:
        self.comm = self.registry.obtain(self.ranks)  # leak: this class's teardown ends halo only
        self.halo = self.registry.obtain(self.ranks[:2])  # clean: teardown relinquishes it

    def teardown(self) -> None:
        self.registry.relinquish(self.halo)
        self.comm = None

    def sync(self, t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=self.comm.pg)
        return t


class Mesh:
    def __init__(self, dims: list[ParallelDim]):
        self.dims = dims
        self.temporary: dict[str, Comm] = {}
        self.on_close: list[Callable[[], None]] = []

    def __enter__(self) -> "Mesh":
        for d in self.dims:
            d.setup()
        return self

    def __exit__(self, *exc) -> None:
        for d in reversed(self.dims):
            d.teardown()
        for hook in reversed(self.on_close):
            hook()
        for comm in self.temporary.values():
            REGISTRY.relinquish(comm)
        self.temporary.clear()

    def recross(self, label: str, ranks: list[int]) -> Comm:
        """Replaces the communicator of a label after ranks were exchanged."""
        self.temporary[label] = comm = REGISTRY.obtain(ranks)  # leak: a second recross overwrites the entry
        return comm

    def adopt(self, ranks: list[int]) -> Comm:
        comm = REGISTRY.obtain(ranks)  # clean: near miss, the close hook relinquishes it
        self.on_close.append(lambda: REGISTRY.relinquish(comm))
        return comm


def broadcast_object(ranks: list[int], blob: torch.Tensor) -> torch.Tensor:
    comm = REGISTRY.obtain(ranks, "gloo")  # leak: the one-rank shortcut returns without relinquish
    if comm.size == 1:
        return blob
    dist.broadcast(blob, src=ranks[0], group=comm.pg)
    REGISTRY.relinquish(comm)
    return blob


def pick_comm(ranks: list[int], given: Comm | None) -> tuple[Comm, bool]:
    """The communicator to use and whether the caller has to relinquish it."""
    if given is not None:
        return given, False
    return REGISTRY.obtain(ranks), True  # clean: the flag tells the caller that it owns it


def grad_norm(ranks: list[int], sq: torch.Tensor, given: Comm | None = None) -> float:
    comm, own = pick_comm(ranks, given)  # clean: near miss, relinquished when owned
    dist.all_reduce(sq, group=comm.pg)
    if own:
        REGISTRY.relinquish(comm)
    return float(sq.sqrt())


def max_over(ranks: list[int], v: torch.Tensor, given: Comm | None = None) -> float:
    comm, own = pick_comm(ranks, given)  # leak: an owned one of several ranks is never relinquished
    dist.all_reduce(v, op=dist.ReduceOp.MAX, group=comm.pg)
    if not own:
        log.debug("reduced on a communicator of the caller, %d ranks", comm.size)
    elif comm.size == 1:
        REGISTRY.relinquish(comm)
    return float(v)


def probe_pairs(ranks: list[int], nbytes: int) -> dict[tuple[int, int], float]:
    """Bandwidth between all pairs; pairs that this rank is not in are passed over."""
    me = dist.get_rank()
    rates = {}
    for a, b in itertools.combinations(ranks, 2):
        comm = REGISTRY.obtain((a, b))  # clean: near miss, relinquished on the continue and at the end
        if me not in (a, b):
            REGISTRY.relinquish(comm)
            continue
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        dist.all_reduce(torch.empty(nbytes, dtype=torch.uint8, device="cuda"), group=comm.pg)
        end.record()
        end.synchronize()
        rates[(a, b)] = nbytes / max(begin.elapsed_time(end), 1e-3)
        REGISTRY.relinquish(comm)
    return rates
