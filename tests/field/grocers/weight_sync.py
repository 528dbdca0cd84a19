"""Weight exchange between the trainer and the rollout engines."""
from __future__ import annotations

import logging
import queue
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Dict, List, Optional, Set

import torch

log = logging.getLogger(__name__)


class Lease:
    def __init__(self, arena: "SharedArena", index: int):
        self.arena = arena
        self.index = index
        self.live = True

    @property
    def view(self) -> torch.Tensor:
        return self.arena.rows[self.index]

    def release(self) -> None:
        if self.live:
            self.live = False
            self.arena._return(self.index)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


class SharedArena:
    """Rows shared by IPC. lease() waits up to `timeout` and gives None."""

    def __init__(self, rows: int, numel: int):
        self.rows = torch.empty(rows, numel, device="cuda")
        self._free: "queue.Queue[int]" = queue.Queue()
        for i in range(rows):
            self._free.put(i)

    def lease(self, timeout: float = 5.0) -> Optional[Lease]:
        try:
            return Lease(self, self._free.get(timeout=timeout))
        except queue.Empty:
            return None

    def _return(self, index: int) -> None:
        self._free.put(index)


@dataclass
class Offer:
    name: str
    version: int
    lease: Lease
    acks: Set[int]


class Publisher:
    """Offers tensors to engines; an offer ends with the last acknowledgement."""

    def __init__(self, arena: SharedArena, engines: List[int]):
        self.arena = arena
        self.engines = set(engines)
        self.offers: Dict[str, Offer] = {}

    def publish(self, name: str, t: torch.Tensor, version: int) -> bool:
        lease = self.arena.lease()  # leak: a newer version of the name replaces an offer that lacks acks
        if lease is None:
            return False
        lease.view[: t.numel()].copy_(t.view(-1))
        self.offers[name] = Offer(name, version, lease, set(self.engines))
        return True

    def ack(self, name: str, version: int, engine: int) -> None:
        offer = self.offers.get(name)
        if offer is None or offer.version != version:
            return
        offer.acks.discard(engine)
        if not offer.acks:
            self.offers.pop(name).lease.release()

    def drop_engine(self, engine: int) -> None:
        self.engines.discard(engine)
        for name in list(self.offers):
            self.ack(name, self.offers[name].version, engine)


class VersionedPublisher:
    """Keeps every version apart until it is acknowledged or superseded."""

    def __init__(self, arena: SharedArena):
        self.arena = arena
        self.version = 0
        self.offers: Dict[int, Lease] = {}

    def publish(self, t: torch.Tensor) -> Optional[int]:
        lease = self.arena.lease()  # clean: near miss, the key counts up, ack and supersede release
        if lease is None:
            return None
        self.version += 1
        lease.view[: t.numel()].copy_(t.view(-1))
        self.offers[self.version] = lease
        return self.version

    def ack(self, version: int) -> None:
        lease = self.offers.pop(version, None)
        if lease is not None:
            lease.release()

    def supersede(self) -> None:
        for version in [v for v in self.offers if v < self.version]:
            self.offers.pop(version).release()


class BundleSender:
    """Sends a state dict as a bundle of rows."""

    def __init__(self, arena: SharedArena, transport):
        self.arena = arena
        self.transport = transport

    def send(self, state: Dict[str, torch.Tensor]) -> bool:
        with ExitStack() as stack:
            for name, t in state.items():
                lease = self.arena.lease()  # clean: entered in the stack, which ends all on both returns
                if lease is None:
                    return False
                stack.enter_context(lease)
                lease.view[: t.numel()].copy_(t.view(-1))
                self.transport.post(name, lease.index)
            self.transport.barrier()
        return True

    def send_keep(self, state: Dict[str, torch.Tensor]) -> Optional[ExitStack]:
        with ExitStack() as stack:
            for name, t in state.items():
                lease = self.arena.lease()  # clean: near miss, pop_all hands them to the caller
                if lease is None:
                    return None
                stack.enter_context(lease)
                lease.view[: t.numel()].copy_(t.view(-1))
                self.transport.post(name, lease.index)
            return stack.pop_all()

    def send_checked(self, state: Dict[str, torch.Tensor]) -> int:
        sent = 0
        for name, t in state.items():
            lease = self.arena.lease()  # leak: a non-finite tensor goes on to the next without release
            if lease is None:
                break
            lease.view[: t.numel()].copy_(t.view(-1))
            if not torch.isfinite(lease.view[: t.numel()]).all():
                log.error("%s is not finite", name)
                continue
            self.transport.post(name, lease.index)
            self.transport.barrier()
            lease.release()
            sent += 1
        return sent


class WeightMirror:
    """The engine's side: rows held while a forward uses them."""

    def __init__(self, arena: SharedArena, sender: BundleSender):
        self.arena = arena
        self.sender = sender
        self.current: Optional[Lease] = None
        self.next: Optional[Lease] = None
        self.bundle: Optional[ExitStack] = None

    def stage(self, t: torch.Tensor) -> bool:
        if self.next is not None:
            return False
        self.next = self.arena.lease()  # leak: flip rebinds current, the row served until then is not released
        if self.next is None:
            return False
        self.next.view[: t.numel()].copy_(t.view(-1))
        return True

    def flip(self) -> None:
        if self.next is not None:
            self.current, self.next = self.next, None

    def refresh(self, state: Dict[str, torch.Tensor]) -> bool:
        if self.bundle is not None:
            self.bundle.close()
        self.bundle = self.sender.send_keep(state)  # clean: near miss, the former bundle is closed before
        return self.bundle is not None

    def close(self) -> None:
        for lease in (self.current, self.next):
            if lease is not None:
                lease.release()
        if self.bundle is not None:
            self.bundle.close()
        self.current = self.next = self.bundle = None


class DeltaExchange:
    def __init__(self, arena: SharedArena, sender: BundleSender):
        self.arena = arena
        self.sender = sender
        self.base: Dict[str, Lease] = {}

    def rebase(self, state: Dict[str, torch.Tensor]) -> None:
        fresh: Dict[str, Lease] = {}
        for name, t in state.items():
            lease = self.base.pop(name, None) or self.arena.lease()  # clean: near miss, old leases are reused and the rest released below
            if lease is None:
                continue
            lease.view[: t.numel()].copy_(t.view(-1))
            fresh[name] = lease
        for lease in self.base.values():
            lease.release()
        self.base = fresh

    def push(self, state: Dict[str, torch.Tensor]) -> bool:
        delta = {n: t.view(-1) - self.base[n].view[: t.numel()] for n, t in state.items() if n in self.base}
        bundle = self.sender.send_keep(delta)  # leak: the engines did not acknowledge, returns with the bundle open
        if bundle is None:
            return False
        if not self.sender.transport.acknowledged():
            return False
        bundle.close()
        self.rebase(state)
        return True

    def close(self) -> None:
        for lease in self.base.values():
            lease.release()
        self.base.clear()


class BroadcastLoop(threading.Thread):
    """Takes tensors from a queue and sends each through a leased row."""

    def __init__(self, arena: SharedArena, inbox: "queue.Queue", transport):
        super().__init__(daemon=True)
        self.arena = arena
        self.inbox = inbox
        self.transport = transport

    def run(self) -> None:
        while True:
            item = self.inbox.get()
            if item is None:
                return
            try:
                lease = self.arena.lease()  # leak: the transport fails, the handler survives and the loop goes on
                if lease is None:
                    continue
                lease.view[: item.numel()].copy_(item.view(-1))
                self.transport.broadcast(lease.index)
                lease.release()
            except RuntimeError:
                log.exception("broadcast failed")
