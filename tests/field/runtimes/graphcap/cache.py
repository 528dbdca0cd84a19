"""Cache of captured graphs."""
import torch

from .mempool import MemPoolRegistry, StaticInputs


class Entry:
    def __init__(self, graph, pool, inputs, output):
        self.graph = graph
        self.pool = pool
        self.inputs = inputs
        self.output = output
        self.hits = 0


class GraphCache:
    def __init__(self, registry: MemPoolRegistry, inputs: StaticInputs, limit=8):
        self._registry = registry
        self._inputs = inputs
        self._limit = limit
        self._entries = {}
        self._shared = None

    def get(self, key):
        entry = self._entries.get(key)
        if entry is not None:
            entry.hits += 1
        return entry

    def capture(self, key, shape, fn):
        if len(self._entries) >= self._limit:
            self.evict(min(self._entries, key=lambda k: self._entries[k].hits))
        pool = self._registry.open_pool()  # clean: near miss, closed when no input set is there, else by evict
        if pool is None:
            return None
        static = self._inputs.lend(shape)  # clean: kept in the entry, restored by evict
        if static is None:
            self._registry.close_pool(pool)
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.ident):
            output = fn(static)
        self._entries[key] = Entry(graph, pool, static, output)
        return self._entries[key]

    def capture_shared(self, key, static, fn):
        if self._shared is None:
            self._shared = self._registry.open_pool()  # clean: near miss, only opened when absent and closed in clear
            if self._shared is None:
                return None
        pool = self._registry.share(self._shared)  # clean: near miss, the extra user goes with the entry to evict
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.ident):
            output = fn(static)
        self._entries[key] = Entry(graph, pool, None, output)
        return self._entries[key]

    def recapture(self, key, fn):
        entry = self._entries[key]
        pool = self._registry.open_pool()  # leak: overwrites the pool of the entry, which stays open
        if pool is None:
            return False
        entry.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(entry.graph, pool=pool.ident):
            entry.output = fn(entry.inputs)
        entry.pool = pool
        return True

    def evict(self, key):
        entry = self._entries.pop(key)
        entry.graph.reset()
        self._registry.close_pool(entry.pool)
        if entry.inputs is not None:
            self._inputs.restore(entry.inputs)

    def clear(self):
        for key in list(self._entries):
            self.evict(key)
        if self._shared is not None:
            self._registry.close_pool(self._shared)
            self._shared = None
