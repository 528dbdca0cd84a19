"""CUDA graph capture and replay: graph pools, static inputs and capture streams."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Callable, Optional

import torch

logger = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    pass


@dataclass
class StaticInput:
    batch: int
    tokens: torch.Tensor
    positions: torch.Tensor


class StaticInputs:
    def __init__(self, sizes: list[int], copies: int, device: str = "cuda") -> None:
        self._by_size: dict[int, list[StaticInput]] = {
            s: [
                StaticInput(s, torch.zeros(s, dtype=torch.long, device=device), torch.zeros(s, dtype=torch.long, device=device))
                for _ in range(copies)
            ]
            for s in sizes
        }
        self.sizes = sorted(sizes)

    def rent(self, batch: int) -> Optional[StaticInput]:
        for size in self.sizes:
            if size >= batch and self._by_size[size]:
                return self._by_size[size].pop()
        return None

    def give_up(self, item: StaticInput) -> None:
        self._by_size[item.batch].append(item)


class GraphPools:
    def __init__(self, n: int) -> None:
        self._handles = [torch.cuda.graph_pool_handle() for _ in range(n)]
        self._users: dict[tuple[int, int], int] = {h: 0 for h in self._handles}

    def attach(self) -> tuple[int, int]:
        handle = min(self._handles, key=self._users.__getitem__)
        self._users[handle] += 1
        return handle

    def detach(self, handle: tuple[int, int]) -> None:
        self._users[handle] -= 1


class CaptureStreams:
    def __init__(self, n: int) -> None:
        self._idle = [torch.cuda.Stream() for _ in range(n)]

    def lend(self) -> torch.cuda.Stream:
        return self._idle.pop()

    def take_back(self, s: torch.cuda.Stream) -> None:
        self._idle.append(s)


@dataclass
class CapturedGraph:
    key: int
    graph: torch.cuda.CUDAGraph
    pool: tuple[int, int]
    inputs: StaticInput
    output: torch.Tensor


class GraphRunner:
    def __init__(self, model: Callable[..., torch.Tensor], inputs: StaticInputs, pools: GraphPools,
                 streams: CaptureStreams, max_graphs: int) -> None:
        self.model = model
        self.inputs = inputs
        self.pools = pools
        self.streams = streams
        self.max_graphs = max_graphs
        self._graphs: OrderedDict[int, CapturedGraph] = OrderedDict()
        self._bg_stream: Optional[torch.cuda.Stream] = None

    def _record(self, item: StaticInput, pool: tuple[int, int], stream: torch.cuda.Stream):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                out = self.model(item.tokens, item.positions)
        except RuntimeError as exc:
            raise CaptureError(str(exc)) from exc
        return graph, out

    def capture(self, batch: int) -> Optional[CapturedGraph]:
        known = self._graphs.get(batch)
        if known is not None:
            return known
        item = self.inputs.rent(batch)  # leak: a failed capture gives up the stream and pool but not the input
        if item is None:
            return None
        pool = self.pools.attach()  # clean: near miss, detached on failure, else by _drop
        stream = self.streams.lend()  # clean: near miss, taken back on both ways
        try:
            graph, out = self._record(item, pool, stream)
        except CaptureError:
            logger.exception("capture of batch %d failed", batch)
            self.streams.take_back(stream)
            self.pools.detach(pool)
            return None
        self.streams.take_back(stream)
        captured = CapturedGraph(batch, graph, pool, item, out)
        self._graphs[batch] = captured
        self._trim()
        return captured

    def recapture(self, batch: int) -> bool:
        old = self._graphs.get(batch)
        if old is None:
            return False
        pool = self.pools.attach()  # leak: the old pool is overwritten in the entry without detach
        stream = self.streams.lend()  # clean: near miss, finally
        try:
            old.graph, old.output = self._record(old.inputs, pool, stream)
        except CaptureError:
            self.pools.detach(pool)
            return False
        finally:
            self.streams.take_back(stream)
        old.pool = pool
        return True

    def _trim(self) -> None:
        while len(self._graphs) > self.max_graphs:
            _, victim = self._graphs.popitem(last=False)
            self._drop(victim)

    def _drop(self, captured: CapturedGraph) -> None:
        captured.graph.reset()
        self.pools.detach(captured.pool)
        self.inputs.give_up(captured.inputs)

    def replay(self, tokens: torch.Tensor, positions: torch.Tensor) -> Optional[torch.Tensor]:
        captured = self._graphs.get(len(tokens))
        if captured is None:
            return None
        captured.inputs.tokens[: len(tokens)].copy_(tokens)
        captured.inputs.positions[: len(tokens)].copy_(positions)
        captured.graph.replay()
        return captured.output[: len(tokens)].clone()

    def eager(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        item = self.inputs.rent(len(tokens))  # clean: near miss, given up exactly where there is one
        if item is not None:
            item.tokens[: len(tokens)].copy_(tokens)
            item.positions[: len(tokens)].copy_(positions)
            out = self.model(item.tokens, item.positions)[: len(tokens)].clone()
        else:
            out = self.model(tokens, positions)
        if item is not None:
            self.inputs.give_up(item)
        return out

    def warmup(self, sizes: list[int], rounds: int) -> int:
        ok = 0
        stream = self.streams.lend()  # clean: taken back after the loop
        for size in sizes:
            item = self.inputs.rent(size)  # leak: once one round fails, break goes past give_up
            if item is None:
                continue
            try:
                for _ in range(rounds):
                    with torch.cuda.stream(stream):
                        self.model(item.tokens, item.positions)
            except torch.cuda.OutOfMemoryError:
                logger.warning("batch %d does not fit", size)
                break
            self.inputs.give_up(item)
            ok += 1
        self.streams.take_back(stream)
        return ok

    def largest_fitting(self, sizes: list[int]) -> int:
        best = 0
        for size in sorted(sizes):
            item = self.inputs.rent(size)  # clean: near miss, finally runs before break too
            if item is None:
                break
            try:
                self.model(item.tokens, item.positions)
                best = size
            except torch.cuda.OutOfMemoryError:
                break
            finally:
                self.inputs.give_up(item)
        return best

    def enable_background(self) -> torch.cuda.Stream:
        self._bg_stream = self.streams.lend()  # leak: enabled a second time it overwrites the first stream
        return self._bg_stream

    def close(self) -> None:
        while self._graphs:
            _, captured = self._graphs.popitem()
            self._drop(captured)
        if self._bg_stream is not None:
            self.streams.take_back(self._bg_stream)
            self._bg_stream = None
