"""Static input/output buffers for captured decode graphs."""
from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import Any, Callable

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger("graphs")


def _empty(numel: int) -> Any:
    if torch is None:
        return [0.0] * numel
    return torch.zeros(numel)


class StaticBufferPool:
    """Buffers keyed by size class; capture needs stable addresses, so nothing is ever freed."""

    def __init__(self, classes: list[int], per_class: int) -> None:
        self.classes = sorted(classes)
        self._bins = {c: [_empty(c) for _ in range(per_class)] for c in self.classes}

    def size_class(self, numel: int) -> int:
        return self.classes[bisect.bisect_left(self.classes, numel)]

    def get(self, numel: int) -> Any | None:
        bin_ = self._bins[self.size_class(numel)]
        return bin_.pop() if bin_ else None

    def put(self, buf: Any) -> None:
        self._bins[len(buf)].append(buf)

    def get_or_grow(self, numel: int) -> Any:
        buf = self.get(numel)  # clean: returned, or None and replaced by a new one
        if buf is None:
            buf = _empty(self.size_class(numel))
        return buf

    def get_many(self, numel: int, n: int) -> list[Any] | None:
        bufs: list[Any] = []
        while len(bufs) < n:
            buf = self.get(numel)  # leak: None half way returns with the earlier ones in a local list
            if buf is None:
                return None
            bufs.append(buf)
        return bufs

    def put_many(self, bufs: list[Any]) -> None:
        for buf in bufs:
            self.put(buf)


@dataclass
class CapturedGraph:
    batch: int
    replay: Callable[[], None]
    inputs: Any
    outputs: Any


class GraphRunner:
    def __init__(self, pool: StaticBufferPool, model: Callable[[Any, Any], None], hidden: int) -> None:
        self.pool = pool
        self.model = model
        self.hidden = hidden
        self.graphs: dict[int, CapturedGraph] = {}
        self.logits: Any | None = None

    def capture(self, batch: int) -> CapturedGraph | None:
        inputs = self.pool.get(batch * self.hidden)  # leak: lost when no output buffer is to be had
        if inputs is None:
            return None
        outputs = self.pool.get(batch * self.hidden)  # clean: goes into the graph, released by discard()
        if outputs is None:
            return None
        self.model(inputs, outputs)
        graph = CapturedGraph(batch, lambda: self.model(inputs, outputs), inputs, outputs)
        self.discard(batch)
        self.graphs[batch] = graph
        return graph

    def capture_prefill(self, batch: int, tokens: int) -> CapturedGraph | None:
        need = batch * tokens
        inputs = self.pool.get(need)  # clean: put back when the second is missing or the capture fails
        if inputs is None:
            return None
        outputs = self.pool.get(need)  # clean: near miss, both are put back in the except branch
        if outputs is None:
            self.pool.put(inputs)
            return None
        try:
            self.model(inputs, outputs)
        except RuntimeError:
            for buf in (outputs, inputs):
                self.pool.put(buf)
            return None
        self.discard(-batch)
        self.graphs[-batch] = CapturedGraph(batch, lambda: self.model(inputs, outputs), inputs, outputs)
        return self.graphs[-batch]

    def average(self, rows: list[list[float]]) -> list[float] | None:
        width = max(len(r) for r in rows)
        bufs = self.pool.get_many(width, len(rows))  # clean: put back as a whole
        if bufs is None:
            return None
        for buf, row in zip(bufs, rows):
            buf[: len(row)] = row
        mean = [sum(float(b[i]) for b in bufs) / len(bufs) for i in range(width)]
        self.pool.put_many(bufs)
        return mean

    def discard(self, batch: int) -> None:
        graph = self.graphs.pop(batch, None)
        if graph is not None:
            self.pool.put(graph.inputs)
            self.pool.put(graph.outputs)

    def _forward(self, values: list[float]) -> Any:
        """Result lives in a pooled buffer that the caller gives back."""
        out = self.pool.get_or_grow(len(values))  # clean: returned to the caller
        for i, v in enumerate(values):
            out[i] = v
        self.model(out, out)
        return out

    def logprobs(self, values: list[float]) -> list[float]:
        out = self._forward(values)  # leak: copied into a list and dropped
        return [float(x) for x in out[: len(values)]]

    def embedding(self, values: list[float], normalize: bool) -> list[float]:
        out = self._forward(values)  # clean: near miss, put back on both branches
        if not normalize:
            result = list(out[: len(values)])
            self.pool.put(out)
            return result
        norm = sum(float(x) ** 2 for x in out[: len(values)]) ** 0.5 or 1.0
        result = [float(x) / norm for x in out[: len(values)]]
        self.pool.put(out)
        return result

    def generate(self, values: list[float], steps: int) -> list[float]:
        hidden = self._forward(values)  # clean: near miss, the loop puts back the previous one before rebinding
        for _ in range(steps):
            nxt = self._forward(list(hidden[: len(values)]))  # clean: becomes hidden, put back in the next round or at the end
            self.pool.put(hidden)
            hidden = nxt
        result = list(hidden[: len(values)])
        self.pool.put(hidden)
        return result

    def refine(self, values: list[float], tol: float) -> list[float]:
        hidden = self._forward(values)  # leak: rebound in the loop without a put
        for _ in range(16):
            prev = list(hidden[: len(values)])
            hidden = self._forward(prev)  # leak: the next round rebinds it again
            if max(abs(a - b) for a, b in zip(prev, hidden)) < tol:
                break
        result = list(hidden[: len(values)])
        self.pool.put(hidden)
        return result

    def step(self, values: list[float]) -> Any:
        """Keeps the last logits for the sampler until the next step."""
        if self.logits is not None:
            self.pool.put(self.logits)
        self.logits = self._forward(values)  # clean: near miss, the former one is put back just before
        return self.logits

    def close(self) -> None:
        if self.logits is not None:
            self.pool.put(self.logits)
            self.logits = None
        for batch in list(self.graphs):
            self.discard(batch)


class WarmupRunner(GraphRunner):
    def __init__(self, pool: StaticBufferPool, model: Callable[[Any, Any], None], hidden: int) -> None:
        super().__init__(pool, model, hidden)
        self.warm: Any | None = None

    def warmup(self, sizes: list[int]) -> None:
        for size in sizes:
            self.warm = self._forward([0.0] * size)  # leak: every size overwrites the buffer of the one before
        if self.warm is not None:
            self.pool.put(self.warm)
            self.warm = None

    def warmup_graphs(self, batches: list[int]) -> int:
        return sum(self.capture(b) is not None for b in batches)  # clean: the graph is kept in self.graphs and discarded there
