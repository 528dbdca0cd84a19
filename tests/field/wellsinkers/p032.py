"""CPU cores for pinned workers, taken as a set from one NUMA node."""
import os


class CoreMap:
    def __init__(self, nodes):
        self._idle = [set(cores) for cores in nodes]
        self._home = {c: n for n, cores in enumerate(nodes) for c in cores}

    def claim_cores(self, n, node=None):
        wanted = range(len(self._idle)) if node is None else (node,)
        for i in wanted:
            if len(self._idle[i]) >= n:
                return frozenset(self._idle[i].pop() for _ in range(n))
        return frozenset()

    def yield_cores(self, cores):
        for core in cores:
            self._idle[self._home[core]].add(core)

    def node_of(self, cores):
        return self._home[next(iter(cores))]


class PinnedJob:
    def __init__(self, cores_map, command):
        self.cores_map = cores_map
        self.command = command
        self.cores = frozenset()

    def start(self, n):
        self.cores = self.cores_map.claim_cores(n)  # clean: stored, yielded by join
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def join(self):
        self.cores_map.yield_cores(self.cores)
        self.cores = frozenset()


def run_pinned(cores_map, n, work):
    cores = cores_map.claim_cores(n)  # leak: not yielded when the work fails
    if not cores:
        return work(None)
    rc = work(cores)
    if rc != 0:
        return rc
    cores_map.yield_cores(cores)
    return 0


def bench_nodes(cores_map, nodes, work):
    times = {}
    for node in nodes:
        cores = cores_map.claim_cores(4, node)  # clean: yielded each time round
        if cores:
            times[node] = work(cores)
            cores_map.yield_cores(cores)
    return times


def widest(cores_map, limit):
    best = frozenset()
    for n in range(1, limit + 1):
        cores = cores_map.claim_cores(n)  # leak: smaller sets are overwritten
        if not cores:
            break
        best = cores
    cores_map.yield_cores(best)
    return len(best)
