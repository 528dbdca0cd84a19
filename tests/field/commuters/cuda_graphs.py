"""Captured decode graphs, several instances per batch size, checked out per step."""
from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional

import torch

log = logging.getLogger("graphs")


@dataclass
class GraphInstance:
    batch: int
    inputs: torch.Tensor
    outputs: torch.Tensor
    graph: Optional[torch.cuda.CUDAGraph] = None
    replays: int = 0

    def replay(self, ids: torch.Tensor) -> torch.Tensor:
        self.inputs[: ids.shape[0]].copy_(ids)
        if self.graph is not None:
            self.graph.replay()
        self.replays += 1
        return self.outputs[: ids.shape[0]]


class GraphRack:
    def __init__(self, sizes: list[int], copies: int, dim: int) -> None:
        self.sizes = sorted(sizes)
        self._rack: dict[int, list[GraphInstance]] = defaultdict(list)
        for b in self.sizes:
            for _ in range(copies):
                self._rack[b].append(GraphInstance(b, torch.zeros(b, dtype=torch.long), torch.zeros(b, dim)))

    def pick(self, batch: int) -> Optional[GraphInstance]:
        at = bisect.bisect_left(self.sizes, batch)
        for size in self.sizes[at:]:
            if self._rack[size]:
                return self._rack[size].pop()  # clean: the caller's until rack()
        return None

    def pick_exact(self, batch: int) -> Optional[GraphInstance]:
        inst = self._rack[batch].pop() if self._rack[batch] else None  # clean: near miss, an uncaptured one is racked before None is returned
        if inst is not None and inst.graph is None:
            self._rack[batch].append(inst)
            return None
        return inst

    def rack(self, inst: GraphInstance) -> None:
        self._rack[inst.batch].append(inst)

    @contextmanager
    def using(self, batch: int) -> Iterator[Optional[GraphInstance]]:
        inst = self.pick(batch)  # clean: near miss, None is yielded too and only a real one racked
        try:
            yield inst
        finally:
            if inst is not None:
                self.rack(inst)


class DecodeRunner:
    def __init__(self, rack: GraphRack, model: torch.nn.Module) -> None:
        self.rack = rack
        self.model = model
        self.bound: Optional[GraphInstance] = None

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        with self.rack.using(ids.shape[0]) as inst:  # clean: context manager
            if inst is None:
                return self.model(ids)
            return inst.replay(ids).clone()

    def run_logged(self, ids: torch.Tensor) -> torch.Tensor:
        inst = self.rack.pick(ids.shape[0])  # leak: a mismatch in size falls back to eager and forgets the instance
        if inst is None or inst.batch > 2 * ids.shape[0]:
            log.debug("eager for %d", ids.shape[0])
            return self.model(ids)
        out = inst.replay(ids).clone()
        self.rack.rack(inst)
        return out

    def bind(self, batch: int) -> bool:
        if self.bound is not None and self.bound.batch >= batch:
            return True
        wider = self.rack.pick(batch)  # clean: near miss, the narrower one is racked when replaced
        if wider is None:
            return False
        if self.bound is not None:
            self.rack.rack(self.bound)
        self.bound = wider
        return True

    def unbind(self) -> None:
        inst, self.bound = self.bound, None
        if inst is not None:
            self.rack.rack(inst)

    def run_bound(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        if self.bound is None:
            return None
        if ids.shape[0] > self.bound.batch:
            self.bound = self.rack.pick(ids.shape[0])  # leak: the instance bound until now is not racked
            if self.bound is None:
                return self.model(ids)
        return self.bound.replay(ids)

    def run_split(self, ids: torch.Tensor, parts: int) -> Optional[torch.Tensor]:
        chunks = ids.chunk(parts)
        with ExitStack() as stack:
            outs = []
            for chunk in chunks:
                inst = self.rack.pick(chunk.shape[0])  # clean: near miss, the stack's callback racks it on every way out
                if inst is None:
                    return None
                stack.callback(self.rack.rack, inst)
                outs.append(inst.replay(chunk).clone())
            return torch.cat(outs)

    def run_pair(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ga = self.rack.pick_exact(a.shape[0])  # leak: eager for both when the second has no graph, the first stays out
        gb = self.rack.pick_exact(b.shape[0])  # clean: racked in the branch where both are there, and when alone
        if ga is None:
            if gb is not None:
                self.rack.rack(gb)
            return self.model(a), self.model(b)
        if gb is None:
            return self.model(a), self.model(b)
        out = ga.replay(a).clone(), gb.replay(b).clone()
        self.rack.rack(ga)
        self.rack.rack(gb)
        return out


def recapture(rack: GraphRack, batch: int, model: torch.nn.Module) -> int:
    done = 0
    fresh: list[GraphInstance] = []
    while (inst := rack.pick_exact(batch)) is not None:  # leak: instances never replayed are skipped and not collected
        if inst.replays == 0:
            continue
        inst.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(inst.graph):
            inst.outputs = model(inst.inputs)
        fresh.append(inst)
        done += 1
    for inst in fresh:
        rack.rack(inst)
    return done


def widest(rack: GraphRack) -> int:
    for size in reversed(rack.sizes):
        inst = rack.pick(size)  # leak: returning its size leaves the instance picked
        if inst is None:
            continue
        return inst.batch
    return 0
