"""Places env servers: a TCP port from a heap and a GPU slot per server."""

import argparse
import heapq
import logging
import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

log = logging.getLogger("envs")


class PortHeap:
    def __init__(self, lo, hi):
        self._h = list(range(lo, hi))
        heapq.heapify(self._h)
        self._used = set()

    def draw(self):
        """Lowest unused port; 0 when there is none."""
        if not self._h:
            return 0
        p = heapq.heappop(self._h)  # clean: recorded as used and returned
        self._used.add(p)
        return p

    def draw_even(self):
        """RTP servers want an even port."""
        while self._h:
            p = heapq.heappop(self._h)  # leak: odd ports on top are popped for good
            if p % 2 == 0:
                self._used.add(p)
                return p
        return 0

    def undraw(self, p):
        if p in self._used:
            self._used.remove(p)
            heapq.heappush(self._h, p)


class GpuSlots:
    """At most `per_gpu` env servers on each device."""

    def __init__(self, gpus, per_gpu):
        self.count = {g: 0 for g in range(gpus)}
        self.per_gpu = per_gpu

    def seat(self):
        gpu = min(self.count, key=self.count.get, default=None)
        if gpu is None or self.count[gpu] >= self.per_gpu:
            return None
        self.count[gpu] += 1
        return gpu

    def unseat(self, gpu):
        self.count[gpu] -= 1


class Placement(NamedTuple):
    port: int
    gpu: int


@dataclass
class Server:
    name: str
    place: Placement
    alive: bool = True


class Placer:
    def __init__(self, ports, gpus):
        self.ports = ports
        self.gpus = gpus

    def place(self):
        port = self.ports.draw()  # clean: undrawn when no seat is free, else in the placement
        if not port:
            return None
        gpu = self.gpus.seat()  # clean: goes out in the placement
        if gpu is None:
            self.ports.undraw(port)
            return None
        return Placement(port, gpu)

    def unplace(self, where):
        self.gpus.unseat(where.gpu)
        self.ports.undraw(where.port)


class EnvCluster:
    def __init__(self, placer, spawn):
        self.placer = placer
        self.spawn = spawn
        self.servers = {}

    def launch(self, name):
        if name in self.servers:
            return self.servers[name]
        where = self.placer.place()  # leak: a failed spawn returns None without unplace
        if where is None:
            log.warning("no room for %s", name)
            return None
        if not self.spawn(name, where.port, where.gpu):
            log.error("%s did not start on port %d", name, where.port)
            return None
        self.servers[name] = Server(name, where)
        return self.servers[name]

    def relocate(self, name):
        """Start the server somewhere else, then give up the old place."""
        server = self.servers.get(name)
        if server is None:
            return False
        where = self.placer.place()  # clean: near miss, unplaced on a failed spawn, else swapped for the old one
        if where is None:
            return False
        if not self.spawn(name, where.port, where.gpu):
            self.placer.unplace(where)
            return False
        old, server.place = server.place, where
        self.placer.unplace(old)
        return True

    def sweep(self):
        for name in [n for n, s in self.servers.items() if not s.alive]:
            self.placer.unplace(self.servers.pop(name).place)

    def stop(self, name):
        server = self.servers.pop(name, None)
        if server is not None:
            self.placer.unplace(server.place)

    def stop_all(self):
        for name in list(self.servers):
            self.stop(name)


class EvalServer:
    """One server for an evaluation run, GPU seat only if asked for."""

    def __init__(self, placer, use_gpu):
        self.placer = placer
        self.use_gpu = use_gpu
        self.port = 0
        self.gpu = None

    def start(self):
        if self.port:
            return True
        self.port = self.placer.ports.draw_even()  # clean: stays in self.port, stop() undraws it
        if not self.port:
            return False
        if self.use_gpu:
            self.gpu = self.placer.gpus.seat()  # leak: stop() unseats only gpu numbers that are truthy, so not gpu 0
        return True

    def stop(self):
        if self.gpu:
            self.placer.gpus.unseat(self.gpu)
            self.gpu = None
        if self.port:
            self.placer.ports.undraw(self.port)
            self.port = 0


def reserve_block(ports, n):
    """n consecutive ports for a vectorised env, or []."""
    block = []
    while len(block) < n:
        p = ports.draw()  # leak: ports before a gap are forgotten when the block restarts
        if not p:
            for q in block:
                ports.undraw(q)
            return []
        if block and p != block[-1] + 1:
            block = []
        block.append(p)
    return block


def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("--lo", type=int, default=20000)
    ap.add_argument("--hi", type=int, default=20100)
    ap.add_argument("--gpus", type=int, default=int(os.environ.get("NGPU", "1")))
    ap.add_argument("names", nargs="*")
    ns = ap.parse_args(argv)
    cluster = EnvCluster(Placer(PortHeap(ns.lo, ns.hi), GpuSlots(ns.gpus, 8)), lambda *a: True)
    try:
        for name in ns.names:
            if cluster.launch(name) is None:  # clean: the cluster keeps the server, stop_all() below
                return 1
        return 0
    finally:
        cluster.stop_all()


if __name__ == "__main__":
    sys.exit(main())
