"""Devices, graphs, memory accounts, exported handles and peer links of a node."""
from __future__ import annotations

import struct
import threading
from collections import Counter
from dataclasses import dataclass


class DeviceError(RuntimeError):
    pass


class DeviceYard:
    """Whole devices for jobs, lent as frozensets."""

    def __init__(self, n):
        self._idle = set(range(n))
        self._lock = threading.Lock()
        self.largest = 0

    def commandeer(self, k):
        with self._lock:
            if k > len(self._idle):
                return None
            got = frozenset(sorted(self._idle)[:k])
            self._idle -= got
            self.largest = max(self.largest, k)
            return got

    def hand_back(self, devices):
        with self._lock:
            assert not devices & self._idle
            self._idle |= devices


def run_trial(yard, trial):
    devices = yard.commandeer(trial.ndev)  # clean: handed back whole
    if devices is None:
        return "queued"
    score = trial.run(sorted(devices))
    yard.hand_back(devices)
    return score


def run_elastic(yard, trial):
    devices = yard.commandeer(trial.max_dev)  # leak: after shrinking only the kept part is handed back
    if devices is None:
        return None
    if trial.memory < 100:
        devices = frozenset(sorted(devices)[: trial.min_dev])
    score = trial.run(sorted(devices))
    yard.hand_back(devices)
    return score


def run_shrinking(yard, trial):
    devices = yard.commandeer(trial.max_dev)  # clean: near miss, spare and rest are handed back apart
    if devices is None:
        return None
    if trial.memory < 100:
        spare = frozenset(sorted(devices)[trial.min_dev :])
        yard.hand_back(spare)
        devices -= spare
    score = trial.run(sorted(devices))
    yard.hand_back(devices)
    return score


@dataclass(eq=False)
class GraphExec:
    key: tuple
    runs: int = 0
    alive: bool = True

    def replay(self, inputs):
        if not self.alive:
            raise DeviceError("graph is destroyed")
        self.runs += 1
        return inputs


class GraphShop:
    """Executable graphs cost device memory, so their number is bounded."""

    def __init__(self, capacity=16):
        self._capacity = capacity
        self._instances = []

    def instantiate(self, *key):
        if len(self._instances) >= self._capacity:
            raise DeviceError("too many graphs")
        g = GraphExec(key)
        self._instances.append(g)
        return g

    def destroy(self, graph):
        self._instances.remove(graph)
        graph.alive = False


class GraphRunner:
    def __init__(self, shop):
        self.shop = shop
        self.graphs = {}

    def run(self, batch, inputs):
        g = self.graphs.get(batch)
        if g is None:
            g = self.graphs[batch] = self.shop.instantiate(batch)  # clean: near miss, kept by batch and destroyed by reset
        return g.replay(inputs)

    def reset(self):
        while self.graphs:
            _, g = self.graphs.popitem()
            self.shop.destroy(g)


class LastShapeRunner:
    def __init__(self, shop):
        self.shop = shop
        self.shape = None
        self.graph = None

    def run(self, shape, inputs):
        if shape != self.shape:
            self.graph = self.shop.instantiate(shape)  # leak: a new shape overwrites the graph without destroy
            self.shape = shape
        return self.graph.replay(inputs)

    def close(self):
        if self.graph is not None:
            self.shop.destroy(self.graph)
            self.graph = None


class MemoryLedger:
    """Bytes by tag. What is booked on must be booked off."""

    def __init__(self, limit):
        self._limit = limit
        self._by_tag = Counter()

    @property
    def total(self):
        return sum(self._by_tag.values())

    def book(self, tag, n):
        if self.total + n > self._limit:
            raise MemoryError(f"{tag}: {n}")
        self._by_tag[tag] += n

    def unbook(self, tag, n):
        self._by_tag[tag] -= n
        if self._by_tag[tag] < 0:
            raise DeviceError(f"{tag} is booked off too often")


def forward(ledger, layer, x):
    ledger.book("act", layer.act_bytes)  # clean: the same tag and size are booked off
    y = layer(x)
    ledger.unbook("act", layer.act_bytes)
    return y


def forward_cached(ledger, layer, x, cache):
    ledger.book("act", layer.act_bytes)  # leak: a cached result returns with the bytes booked
    y = cache.get(layer.name)
    if y is not None:
        return y
    y = cache[layer.name] = layer(x)
    ledger.unbook("act", layer.act_bytes)
    return y


class Workspace:
    def __init__(self, ledger):
        self.ledger = ledger
        self.size = 0

    def resize(self, n):
        self.ledger.unbook("ws", self.size)
        self.size = 0
        self.ledger.book("ws", n)  # clean: near miss, the next resize or close books it off
        self.size = n

    def close(self):
        self.resize(0)


class IpcExporter:
    """Exported memory as 16-byte handles for other processes."""

    def __init__(self):
        self._exports = {}
        self._serial = 0

    def export(self, ptr, size):
        self._serial += 1
        handle = struct.pack("<QII", ptr, size, self._serial)
        self._exports[handle] = (ptr, size)
        return handle

    def withdraw(self, handle):
        if handle not in self._exports:
            raise DeviceError("not exported")
        del self._exports[handle]


def share_weights(exporter, mailbox, tensors):
    handles = []
    for t in tensors:
        handles.append(exporter.export(t.ptr, t.size))  # clean: all withdrawn after the peer's answer
    mailbox.send(handles)
    mailbox.wait()
    for h in handles:
        exporter.withdraw(h)


def share_changed(exporter, mailbox, tensors, versions):
    sent = []
    for t in tensors:
        h = exporter.export(t.ptr, t.size)  # leak: an unchanged tensor is skipped with its export open
        if versions.get(t.name) == t.version:
            continue
        mailbox.send(h)
        sent.append(h)
    mailbox.wait()
    for h in sent:
        exporter.withdraw(h)
    return len(sent)


@dataclass(frozen=True)
class Link:
    a: int
    b: int


class LinkBroker:
    """Enables peer access; a pair is enabled while links on it are up."""

    def __init__(self, max_peers=4):
        self._up = Counter()
        self._peers = Counter()
        self._max = max_peers

    def bring_up(self, a, b):
        link = Link(min(a, b), max(a, b))
        if not self._up[link]:
            if max(self._peers[a], self._peers[b]) >= self._max:
                return None
            self._peers[a] += 1
            self._peers[b] += 1
        self._up[link] += 1
        return link

    def _down(self, link):
        self._up[link] -= 1
        if not self._up[link]:
            self._peers[link.a] -= 1
            self._peers[link.b] -= 1


class LinkCloser:
    """The only one who takes links down, in batches."""

    def __init__(self, broker):
        self._broker = broker
        self._pending = []

    def defer(self, link):
        self._pending.append(link)

    def take_down(self, link):
        self._broker._down(link)

    def run(self):
        while self._pending:
            self._broker._down(self._pending.pop())


def copy_peer(broker, closer, src, dst, buf):
    link = broker.bring_up(src, dst)  # clean: near miss, deferred to the closer that takes it down
    if link is None:
        return buf.via_host(dst)
    closer.defer(link)
    return buf.via_peer(link)


def copy_ring(broker, closer, devices, buf):
    for a, b in zip(devices, devices[1:]):
        link = broker.bring_up(a, b)  # leak: a failed hop returns False with the link up
        if link is None:
            return False
        if not buf.via_peer(link):
            return False
        closer.take_down(link)
    return True


class KernelRegistry:
    """Kernels by name; registered for the life of the process."""

    def __init__(self):
        self._kernels = {}
        self.lookups = 0

    def register(self, name, fn):
        if name in self._kernels:
            raise KeyError(name)
        self._kernels[name] = fn
        return fn

    def lookup(self, name):
        self.lookups += 1
        return self._kernels.get(name)


def install_kernels(registry, table, available):
    for name, fn in table.items():
        k = registry.register(name, fn)  # clean: a permanent registration
        if name not in available:
            continue
        k.ready = True
