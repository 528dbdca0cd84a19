"""Descriptor lists for a one-sided transfer library."""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from typing import Iterable, Iterator, Sequence

import torch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Desc:
    handle: int
    addr: int
    size: int


class Agent:
    def __init__(self, name: str) -> None:
        self.name = name
        self._regs: dict[int, Desc] = {}
        self._xfers: set[int] = set()
        self._seq = 0

    def register_memory(self, t: torch.Tensor) -> Desc:
        self._seq += 1
        d = Desc(self._seq, t.data_ptr(), t.nbytes)
        self._regs[d.handle] = d
        return d

    def deregister_memory(self, d: Desc) -> None:
        del self._regs[d.handle]

    def create_xfer(self, src: Sequence[Desc], dst: Sequence[Desc]) -> int:
        self._seq += 1
        self._xfers.add(self._seq)
        return self._seq

    def release_xfer(self, h: int) -> None:
        self._xfers.discard(h)

    def state(self, h: int) -> str:
        return "DONE" if h in self._xfers else "ERR"


class RegisteredTensor:
    """Deregisters when it is collected."""

    def __init__(self, agent: Agent, t: torch.Tensor) -> None:
        self.t = t
        self.desc = agent.register_memory(t)  # clean: near miss, the finalizer deregisters
        weakref.finalize(self, agent.deregister_memory, self.desc)


class TransferPlan:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.src: list[Desc] = []
        self.dst: list[Desc] = []
        self.xfer: int | None = None

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.src.append(self.agent.register_memory(a))  # clean: close() goes over the sources
        self.dst.append(self.agent.register_memory(b))  # leak: close() clears the destinations only

    def go(self) -> str:
        if self.xfer is not None:
            self.agent.release_xfer(self.xfer)
        self.xfer = self.agent.create_xfer(self.src, self.dst)  # clean: near miss, the previous is released first, close() does the last
        return self.agent.state(self.xfer)

    def close(self) -> None:
        for d in self.src:
            self.agent.deregister_memory(d)
        self.src.clear()
        self.dst.clear()
        if self.xfer is not None:
            self.agent.release_xfer(self.xfer)
            self.xfer = None


class LayerRegions:
    def __init__(self, agent: Agent, caches: dict[str, torch.Tensor]) -> None:
        self.agent = agent
        self.regions = {name: agent.register_memory(t) for name, t in caches.items()}  # clean: close() deregisters all values

    def close(self) -> None:
        for d in self.regions.values():
            self.agent.deregister_memory(d)
        self.regions = {}


class WindowRegions:
    def __init__(self, agent: Agent, caches: dict[str, torch.Tensor], window: int) -> None:
        self.agent = agent
        self.regions = {name: agent.register_memory(t) for name, t in caches.items()}  # leak: only the window is deregistered
        self.window = window

    def close(self) -> None:
        for d in list(self.regions.values())[: self.window]:
            self.agent.deregister_memory(d)
        self.regions = {}


def read_once(agent: Agent, src: torch.Tensor, dst: torch.Tensor) -> bool:
    a = agent.register_memory(src)  # clean: deregistered on both returns
    b = agent.register_memory(dst)  # leak: the failed transfer deregisters the source only
    h = agent.create_xfer([a], [b])  # clean: released on both returns
    if agent.state(h) != "DONE":
        agent.release_xfer(h)
        agent.deregister_memory(a)
        return False
    agent.release_xfer(h)
    agent.deregister_memory(b)
    agent.deregister_memory(a)
    return True


@contextlib.contextmanager
def registered(agent: Agent, *ts: torch.Tensor) -> Iterator[list[Desc]]:
    descs = [agent.register_memory(t) for t in ts]  # clean: all are deregistered in the finally
    try:
        yield descs
    finally:
        for d in descs:
            agent.deregister_memory(d)


def write_pair(agent: Agent, src: torch.Tensor, dst: torch.Tensor) -> bool:
    with registered(agent, src, dst) as (a, b):  # clean: context manager
        h = agent.create_xfer([a], [b])  # leak: the error returns with the transfer handle
        if agent.state(h) == "ERR":
            return False
        agent.release_xfer(h)
        return True


def write_stack(agent: Agent, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    n = 0
    with contextlib.ExitStack() as stack:
        for s, d in pairs:
            a, b = stack.enter_context(registered(agent, s, d))  # clean: the stack leaves each
            h = agent.create_xfer([a], [b])  # clean: near miss, the callback releases also after the break
            stack.callback(agent.release_xfer, h)
            if agent.state(h) != "DONE":
                break
            n += 1
    return n


def poll_all(agent: Agent, descs: Sequence[Desc], rounds: int) -> int:
    bad = 0
    h = agent.create_xfer(descs, descs)  # leak: overwritten when the poll sees an error
    for _ in range(rounds):
        if agent.state(h) != "DONE":
            bad += 1
            h = agent.create_xfer(descs, descs)  # leak: a second error overwrites it as well
    agent.release_xfer(h)
    return bad


def poll_renew(agent: Agent, descs: Sequence[Desc], rounds: int) -> int:
    bad = 0
    h = agent.create_xfer(descs, descs)  # clean: near miss, released before the replacement
    for _ in range(rounds):
        if agent.state(h) != "DONE":
            bad += 1
            agent.release_xfer(h)
            h = agent.create_xfer(descs, descs)  # clean: released before the next or at the end
    agent.release_xfer(h)
    return bad


def region_bytes(agent: Agent, ts: Iterable[torch.Tensor]) -> int:
    return sum(agent.register_memory(t).size for t in ts)  # leak: the descriptors are only measured
