"""LoRA adapters of the Hangar service: docking, rank slabs, leases, swaps, the active adapter."""
from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections import OrderedDict
from typing import Callable, Dict, List, Optional, Tuple


class AdapterHangar:
    """Adapters on the GPU. A docked adapter stays until everybody grounds it; then it may be thrown out."""

    def __init__(self, bays: int, load: Callable, unload: Callable) -> None:
        self._bays = bays
        self._load = load
        self._unload = unload
        self._docked: "OrderedDict[str, list]" = OrderedDict()
        self._lock = threading.Lock()

    def dock(self, name: str):
        with self._lock:
            bay = self._docked.get(name)
            if bay is None:
                if len(self._docked) >= self._bays:
                    self._throw_out_one()
                bay = [self._load(name), 0]
                self._docked[name] = bay
            bay[1] += 1
            self._docked.move_to_end(name)
            return bay[0]

    def ground(self, name: str) -> None:
        with self._lock:
            bay = self._docked[name]
            if bay[1] <= 0:
                raise RuntimeError(f"{name} is on the ground")
            bay[1] -= 1

    def _throw_out_one(self) -> None:
        for name, (weights, users) in self._docked.items():
            if users == 0:
                del self._docked[name]
                self._unload(weights)
                return
        raise RuntimeError("every bay is in use")


def generate(hangar: AdapterHangar, name: str, prompt: str, engine) -> str:
    weights = hangar.dock(name)  # clean: grounded in finally
    try:
        return engine.run(prompt, weights)
    finally:
        hangar.ground(name)


def prewarm(hangar: AdapterHangar, names: List[str], engine) -> int:
    warm = 0
    for name in names:
        weights = hangar.dock(name)  # leak: an adapter of the wrong rank is skipped while docked
        if weights.rank > engine.max_rank:
            engine.warn(name)
            continue
        engine.touch(weights)
        hangar.ground(name)
        warm += 1
    return warm


class RankSlabs:
    """Slots in stacked A/B matrices, by rank. A fit goes to the smallest rank that is large enough."""

    def __init__(self, counts: Dict[int, int]) -> None:
        self._open = {rank: list(range(n)) for rank, n in sorted(counts.items())}
        self._taken: Dict[Tuple[int, int], str] = {}

    def fit(self, name: str, rank: int) -> Optional[Tuple[int, int]]:
        for have, slots in self._open.items():
            if have >= rank and slots:
                where = (have, slots.pop())
                self._taken[where] = name
                return where
        return None

    def unfit(self, where: Tuple[int, int]) -> None:
        self._taken.pop(where)
        self._open[where[0]].append(where[1])


def stack(slabs: RankSlabs, name: str, tensors, stacker) -> Optional[Tuple[int, int]]:
    where = slabs.fit(name, tensors.rank)  # clean: near miss, unfitted when the copy fails and else returned
    if where is None:
        return None
    try:
        stacker.copy(where, tensors)
    except ValueError:
        slabs.unfit(where)
        return None
    return where


def swap_in(slabs: RankSlabs, name: str, tensors, stacker) -> bool:
    where = slabs.fit(name, tensors.rank)  # leak: a dtype mismatch returns False with the slot taken
    if where is None:
        return False
    if tensors.dtype != stacker.dtype:
        return False
    stacker.copy(where, tensors)
    stacker.publish(name, where, on_gone=slabs.unfit)
    return True


class Lease:
    def __init__(self, office: "LeaseOffice", name: str, until: float) -> None:
        self.office = office
        self.name = name
        self.until = until

    def renew(self, seconds: float) -> None:
        self.until = max(self.until, time.monotonic() + seconds)

    def cede(self) -> None:
        self.office._ceded(self)


class LeaseOffice:
    """Leases on base weights. The office sees its leases weakly, and counts those not ceded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._standing = 0
        self._seen: "weakref.WeakSet[Lease]" = weakref.WeakSet()
        self._mu = threading.Lock()

    def apply_for(self, name: str, seconds: float = 30.0) -> Optional[Lease]:
        with self._mu:
            if self._standing >= self._most:
                return None
            self._standing += 1
        lease = Lease(self, name, time.monotonic() + seconds)
        self._seen.add(lease)
        return lease

    def _ceded(self, lease: Lease) -> None:
        with self._mu:
            self._standing -= 1
            self._seen.discard(lease)


def measure(office: LeaseOffice, name: str, probe) -> float:
    lease = office.apply_for(name)  # clean: near miss, None has nothing to cede
    if lease is None:
        return 0.0
    try:
        return probe(lease.name)
    finally:
        lease.cede()


class LeaseKeeper:
    def __init__(self, office: LeaseOffice) -> None:
        self.office = office
        self.lease: Optional[Lease] = None

    def ensure(self, name: str) -> bool:
        if self.lease is not None and self.lease.name == name:
            self.lease.renew(30.0)
            return True
        self.lease = self.office.apply_for(name)  # leak: the lease on another name is overwritten and never ceded
        return self.lease is not None

    def stop(self) -> None:
        if self.lease is not None:
            self.lease.cede()
            self.lease = None


def refresh(office: LeaseOffice, names: List[str], fetch) -> Dict[str, bytes]:
    fetched = {}
    for name in names:
        lease = office.apply_for(name, 5.0)  # leak: the caught timeout ends the turn without ceding
        if lease is None:
            break
        try:
            fetched[name] = fetch(name)
        except TimeoutError:
            fetched[name] = b""
        else:
            lease.cede()
    return fetched


class SwapBoard:
    """One swap for a name at a time; others see that it is under way and keep off."""

    def __init__(self) -> None:
        self._under_way: set = set()
        self._mu = threading.Lock()

    def begin_swap(self, name: str) -> bool:
        with self._mu:
            if name in self._under_way:
                return False
            self._under_way.add(name)
            return True

    def end_swap(self, name: str) -> None:
        with self._mu:
            self._under_way.remove(name)


def hot_swap(board: SwapBoard, name: str, registry, gpu) -> bool:
    if not board.begin_swap(name):  # leak: an unchanged version returns True and the name stays under way
        return False
    version = registry.latest(name)
    if version == gpu.version_of(name):
        return True
    gpu.load(name, version)
    board.end_swap(name)
    return True


def cold_swap(board: SwapBoard, name: str, gpu) -> bool:
    if not board.begin_swap(name):  # clean: ended in finally
        return False
    try:
        if not gpu.unload(name):
            return False
        return gpu.load(name)
    finally:
        board.end_swap(name)


class ActiveAdapter:
    """The adapter of the running task, in a context variable. `wear` gives the token for `doff`."""

    def __init__(self) -> None:
        self._var: contextvars.ContextVar = contextvars.ContextVar("adapter", default=None)
        self.depth = 0

    def wear(self, name: str) -> contextvars.Token:
        self.depth += 1
        return self._var.set(name)

    def doff(self, token: contextvars.Token) -> None:
        self._var.reset(token)
        self.depth -= 1

    @property
    def name(self) -> Optional[str]:
        return self._var.get()


def run_as(active: ActiveAdapter, name: str, fn, *args):
    token = active.wear(name)  # clean: doffed in finally
    try:
        return fn(*args)
    finally:
        active.doff(token)


def compare(active: ActiveAdapter, left: str, right: str, fn) -> Optional[float]:
    token = active.wear(left)  # leak: a missing left score returns with the left adapter worn
    a = fn()
    if a is None:
        return None
    active.doff(token)
    token = active.wear(right)  # clean: doffed before the score is looked at
    b = fn()
    active.doff(token)
    return None if b is None else a - b


class AdapterCatalog:
    """What exists, for the life of the process. Entries are never given back."""

    def __init__(self) -> None:
        self._known: Dict[str, str] = {}

    def register(self, name: str, uri: str) -> str:
        self._known[name] = uri
        return uri

    def unregister_all(self) -> None:
        self._known.clear()


def read_manifest(catalog: AdapterCatalog, lines) -> int:
    n = 0
    for line in lines:
        name, _, uri = line.partition("=")
        catalog.register(name, uri)  # clean: a permanent registry
        if not uri:
            continue
        n += 1
    return n
