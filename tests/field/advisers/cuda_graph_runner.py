"""Captures and replays decode graphs; owns memory pools, streams and static inputs."""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, Callable

import torch


class GraphPoolRegistry:
    """Hands out graph memory pools; a pool lives while it has a holder."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._next = 0

    def new_pool(self) -> int:
        self._next += 1
        self._holders[self._next] = 1
        return self._next

    def share(self, pool: int) -> int:
        self._holders[pool] += 1
        return pool

    def drop(self, pool: int) -> None:
        self._holders[pool] -= 1
        if self._holders[pool] == 0:
            del self._holders[pool]


class StreamPool:
    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self._streams = [make() for _ in range(size)]

    def borrow(self) -> Any | None:
        if not self._streams:
            return None
        return self._streams.pop()

    def give_back(self, stream: Any) -> None:
        self._streams.append(stream)


class StaticInputs:
    def __init__(self, max_bs: int, sets: int) -> None:
        self._idle = [torch.zeros(max_bs, dtype=torch.int64) for _ in range(sets)]
        self._busy = 0

    def obtain(self) -> torch.Tensor | None:
        if not self._idle:
            return None
        self._busy += 1
        return self._idle.pop()

    def restore(self, buf: torch.Tensor) -> None:
        self._busy -= 1
        self._idle.append(buf.zero_())


@dataclass
class CapturedGraph:
    batch_size: int
    pool: int
    inputs: torch.Tensor
    replay: Callable[[torch.Tensor], torch.Tensor]


class CudaGraphRunner:
    def __init__(self, model: Any, pools: GraphPoolRegistry, streams: StreamPool, inputs: StaticInputs) -> None:
        self.model = model
        self.pools = pools
        self.streams = streams
        self.inputs = inputs
        self.graphs: dict[int, CapturedGraph] = {}
        self.draft_graphs: dict[int, CapturedGraph] = {}
        self.base_pool = pools.new_pool()  # clean: the runner's own pool, dropped in reset
        self.side_stream: Any | None = None

    def _trace(self, stream: Any, buf: torch.Tensor, bs: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        try:
            self.model(buf[:bs])
        except torch.cuda.OutOfMemoryError:
            return None
        return lambda ids: self.model(ids)

    def capture(self, bs: int) -> bool:
        if bs in self.graphs:
            return True
        pool = self.pools.share(self.base_pool)  # leak: the return for a missing static input does not drop the share
        buf = self.inputs.obtain()  # clean: near miss, restored when tracing fails, else owned by the captured graph
        if buf is None:
            return False
        stream = self.streams.borrow()  # clean: given back right after tracing
        if stream is None:
            self.inputs.restore(buf)
            self.pools.drop(pool)
            return False
        replay = self._trace(stream, buf, bs)
        self.streams.give_back(stream)
        if replay is None:
            self.inputs.restore(buf)
            self.pools.drop(pool)
            return False
        self.graphs[bs] = CapturedGraph(bs, pool, buf, replay)
        return True

    def capture_draft(self, bs: int) -> None:
        pool = self.pools.new_pool()  # clean: near miss, dropped on failure or by evict of the draft graph
        buf = self.inputs.obtain()  # leak: capturing a batch size again drops the former graph's pool but not its input buffer
        if buf is None:
            self.pools.drop(pool)
            return
        replay = self._trace(None, buf, bs)
        if replay is None:
            self.inputs.restore(buf)
            self.pools.drop(pool)
            return
        old = self.draft_graphs.get(bs)
        if old is not None:
            self.pools.drop(old.pool)
        self.draft_graphs[bs] = CapturedGraph(bs, pool, buf, replay)

    def capture_all(self, sizes: list[int]) -> list[int]:
        done = []
        stream = self.streams.borrow()  # leak: the break on the first size that fails is followed by a return without give_back
        if stream is None:
            return done
        for bs in sorted(sizes, reverse=True):
            if not self.capture(bs):
                break
            done.append(bs)
        else:
            self.streams.give_back(stream)
        return done

    def warm_up(self, sizes: list[int]) -> None:
        stream = self.streams.borrow()  # clean: near miss, the break falls to the give_back behind the loop
        if stream is None:
            return
        for bs in sizes:
            buf = self.inputs.obtain()  # clean: near miss, restored before the break and at the end of each turn
            if buf is None:
                break
            if self._trace(stream, buf, bs) is None:
                self.inputs.restore(buf)
                break
            self.inputs.restore(buf)
        self.streams.give_back(stream)

    def padded_size(self, n: int) -> int | None:
        sizes = sorted(self.graphs)
        pos = bisect.bisect_left(sizes, n)
        return sizes[pos] if pos < len(sizes) else None

    def replay(self, ids: torch.Tensor) -> torch.Tensor | None:
        bs = self.padded_size(ids.numel())
        if bs is None:
            return None
        graph = self.graphs[bs]
        graph.inputs[: ids.numel()].copy_(ids)
        return graph.replay(graph.inputs[:bs])[: ids.numel()]

    def run_eager(self, ids: torch.Tensor, use_stream: bool) -> torch.Tensor | None:
        stream = self.streams.borrow() if use_stream else None  # clean: near miss, both guards ask whether there is one
        if use_stream and stream is None:
            return None
        out = self.model(ids)
        if stream is not None:
            self.streams.give_back(stream)
        return out

    def run_split(self, ids: torch.Tensor, overlap: bool) -> torch.Tensor:
        stream = self.streams.borrow() if overlap or ids.numel() > 512 else None  # leak: long inputs without overlap borrow one, and only overlap gives it back
        half = ids.numel() // 2
        out = torch.cat((self.model(ids[:half]), self.model(ids[half:])))
        if overlap and stream is not None:
            self.streams.give_back(stream)
        return out

    def ensure_side_stream(self) -> Any | None:
        if self.side_stream is None:
            self.side_stream = self.streams.borrow()  # clean: near miss, one for the runner, returned in reset
        return self.side_stream

    def profile(self, bs: int, repeats: int) -> list[float]:
        times: list[float] = []
        buf = None
        for _ in range(repeats):
            buf = self.inputs.obtain()  # leak: each turn rebinds buf and only the last one is restored
            if buf is None:
                break
            out = self.model(buf[:bs])
            times.append(float(out.sum()))
        if buf is not None:
            self.inputs.restore(buf)
        return times

    def _evict(self, table: dict[int, CapturedGraph], bs: int) -> None:
        graph = table.pop(bs)
        self.inputs.restore(graph.inputs)
        self.pools.drop(graph.pool)

    def reset(self) -> None:
        for table in (self.graphs, self.draft_graphs):
            for bs in list(table):
                self._evict(table, bs)
        if self.side_stream is not None:
            self.streams.give_back(self.side_stream)
            self.side_stream = None
        self.pools.drop(self.base_pool)
