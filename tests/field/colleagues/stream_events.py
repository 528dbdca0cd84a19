"""CUDA events for overlap of gather and compute, recycled through a linked list."""
from __future__ import annotations

from typing import Callable, Optional

import torch

class EventNode:
    __slots__ = ("ev", "next")

    def __init__(self) -> None:
        self.ev = torch.cuda.Event()
        self.next: Optional[EventNode] = None

class EventChain:
    """Singly linked list of idle events."""

    def __init__(self, n: int) -> None:
        self.head: Optional[EventNode] = None
        self.idle = 0
        for _ in range(n):
            self.hook(EventNode())

    def unhook(self) -> EventNode:
        node = self.head
        if node is None:
            return EventNode()
        self.head, node.next = node.next, None
        self.idle -= 1
        return node

    def unhook_done(self) -> Optional[EventNode]:
        """An idle event whose last record has completed."""
        node = self.unhook()  # leak: a pending event returns None and falls off the chain
        if not node.ev.query():
            return None
        return node

    def hook(self, node: EventNode) -> None:
        node.next, self.head = self.head, node
        self.idle += 1

class Fence:
    """Record on entry of `src`, wait on `dst` at exit."""

    def __init__(self, chain: EventChain, src, dst) -> None:
        self.chain, self.src, self.dst = chain, src, dst
        self.node: Optional[EventNode] = None

    def __enter__(self) -> "Fence":
        self.node = self.chain.unhook()  # leak: __exit__ returns early when both streams are one
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.src is self.dst:
            return False
        self.node.ev.record(self.src)
        self.dst.wait_event(self.node.ev)
        self.chain.hook(self.node)
        self.node = None
        return False

class SoftFence(Fence):
    def __enter__(self) -> "SoftFence":
        self.node = self.chain.unhook()  # clean: near miss, __exit__ hooks before its early return
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        node, self.node = self.node, None
        if exc_type is None:
            node.ev.record(self.src)
            self.dst.wait_event(node.ev)
        self.chain.hook(node)
        return exc_type is StopIteration

class Marker:
    """Event that may be borrowed from a caller or be its own."""

    def __init__(self, chain: EventChain, node: Optional[EventNode] = None) -> None:
        self.chain = chain
        self.own = node is None
        self.node = node if node is not None else chain.unhook()  # clean: near miss, own flag makes retire() hook it

    def retire(self) -> None:
        if self.own:
            self.chain.hook(self.node)
            self.own = False

class Prefetcher:
    def __init__(self, chain: EventChain, comm, compute) -> None:
        self.chain, self.comm, self.compute = chain, comm, compute
        self.ready: dict[int, EventNode] = {}
        self.tail: Optional[EventNode] = None

    def gather(self, layer: int, fn: Callable[[], torch.Tensor]) -> torch.Tensor:
        stale = self.ready.pop(layer, None)
        if stale is not None:
            self.chain.hook(stale)
        node = self.chain.unhook()  # clean: near miss, stale one hooked; await_layer or reset hooks this
        with torch.cuda.stream(self.comm):
            out = fn()
            node.ev.record(self.comm)
        self.ready[layer] = node
        return out

    def await_layer(self, layer: int) -> None:
        node = self.ready.pop(layer, None)
        if node is None:
            return
        self.compute.wait_event(node.ev)
        self.chain.hook(node)

    def mark_tail(self) -> None:
        self.tail = self.chain.unhook()  # leak: each step's tail overwrites the last one's
        self.tail.ev.record(self.comm)

    def reset(self) -> None:
        for node in self.ready.values():
            self.chain.hook(node)
        self.ready.clear()
        if self.tail is not None:
            self.chain.hook(self.tail)
            self.tail = None

def barrier(chain: EventChain, streams: list) -> None:
    nodes = []
    for s in streams:
        n = chain.unhook()  # clean: collected and hooked in the last loop
        n.ev.record(s)
        nodes.append(n)
    for s in streams:
        for n in nodes:
            s.wait_event(n.ev)
    for n in nodes:
        chain.hook(n)

def poll(chain: EventChain, stream, spins: int) -> bool:
    n = chain.unhook()  # leak: success returns before the hook
    n.ev.record(stream)
    for _ in range(spins):
        if n.ev.query():
            return True
    chain.hook(n)
    return False

def timed_section(chain: EventChain, stream, fn: Callable[[Marker], None], shared: Optional[EventNode]) -> bool:
    m = Marker(chain, shared)  # clean: near miss, retire hooks only what is its own
    try:
        fn(m)
        m.node.ev.record(stream)
        return m.node.ev.query()
    finally:
        m.retire()

def overlap(chain: EventChain, comm, compute, steps: list[Callable[[], None]]) -> None:
    for step in steps:
        with SoftFence(chain, comm, compute):  # clean: soft fence always hooks
            step()
