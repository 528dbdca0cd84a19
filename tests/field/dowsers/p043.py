"""Captured CUDA graphs by batch size; one instance runs once at a time."""
from collections import defaultdict


class GraphPool:
    def __init__(self, capture, sizes):
        self._capture = capture
        self._sizes = sorted(sizes)
        self._ready = defaultdict(list)
        self._size_of = {}

    def _bucket(self, batch):
        for size in self._sizes:
            if size >= batch:
                return size
        return None

    def take_graph(self, batch):
        size = self._bucket(batch)
        if size is None:
            return None
        if self._ready[size]:
            graph = self._ready[size].pop()
        else:
            graph = self._capture(size)
        self._size_of[id(graph)] = size
        return graph

    def park_graph(self, graph):
        self._ready[self._size_of.pop(id(graph))].append(graph)


class DecodeLoop:
    def __init__(self, graphs: GraphPool, eager):
        self.graphs = graphs
        self.eager = eager

    def step(self, batch):
        graph = self.graphs.take_graph(len(batch))  # clean: parked in finally
        if graph is None:
            return self.eager(batch)
        try:
            graph.load(batch)
            return graph.replay()
        finally:
            self.graphs.park_graph(graph)

    def step_dynamic(self, batch):
        graph = self.graphs.take_graph(len(batch))  # leak: a LoRA batch runs eagerly with the graph out
        if graph is None or batch.has_lora:
            return self.eager(batch)
        graph.load(batch)
        out = graph.replay()
        self.graphs.park_graph(graph)
        return out

    def warm(self, sizes):
        for size in sizes:
            self.graphs.take_graph(size)  # leak: captured, never parked
        return len(sizes)

    def time_one(self, size, clock):
        graph = self.graphs.take_graph(size)  # clean: parked below
        if graph is not None:
            ms = clock(graph.replay)
            self.graphs.park_graph(graph)
            return ms
        return None
