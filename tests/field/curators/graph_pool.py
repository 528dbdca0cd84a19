"""CUDA graph capture cache: private memory pools, static inputs, replay streams."""
from __future__ import annotations

import bisect
import contextlib
import logging
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set

import torch

logger = logging.getLogger(__name__)


class GraphPools:
    """Private memory pools are scarce: each one pins its own segment."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._users: Dict[int, int] = {}
        self._next = 0

    def create(self) -> Optional[int]:
        if len(self._users) >= self.limit:
            return None
        self._next += 1
        self._users[self._next] = 1
        return self._next

    def retain(self, pool_id: int) -> int:
        self._users[pool_id] += 1
        return pool_id

    def drop(self, pool_id: int) -> None:
        self._users[pool_id] -= 1
        if not self._users[pool_id]:
            del self._users[pool_id]


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle: List[int] = list(range(n))

    def checkout(self) -> int:
        if not self._idle:
            raise RuntimeError("no replay stream left")
        return self._idle.pop()

    def checkin(self, stream: int) -> None:
        self._idle.append(stream)

    def idle(self) -> int:
        return len(self._idle)

    @contextlib.contextmanager
    def lent(self) -> Iterator[int]:
        stream = self.checkout()  # leak: no finally, an error in the body that the caller handles skips checkin
        yield stream
        self.checkin(stream)


@dataclass
class CapturedGraph:
    batch_size: int
    pool_id: int
    static_in: torch.Tensor
    run: Callable[[torch.Tensor], torch.Tensor]
    aux_pool: Optional[int] = None


class GraphRunner:
    def __init__(
        self,
        model: Callable[[torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        pools: GraphPools,
        streams: StreamPool,
        hidden: int,
        share_pool: bool = True,
    ) -> None:
        self.model = model
        self.sizes = sorted(sizes)
        self.pools = pools
        self.streams = streams
        self.hidden = hidden
        self.shared: Optional[int] = pools.create() if share_pool else None  # clean: near miss, both under the flag, close drops it when set
        self.graphs: Dict[int, CapturedGraph] = {}
        self.bad_sizes: Set[int] = set()

    def _pool_for(self) -> Optional[int]:
        if self.shared is not None:
            return self.pools.retain(self.shared)  # clean: handed on to the caller as its own count
        return self.pools.create()  # clean: handed on to the caller

    def capture(self, batch_size: int) -> bool:
        pool_id = self._pool_for()  # leak: the handled capture failure returns without drop
        if pool_id is None:
            return False
        static_in = torch.zeros(batch_size, self.hidden)
        try:
            self.model(static_in)
        except torch.cuda.OutOfMemoryError:
            logger.warning("capture of size %d ran out of memory", batch_size)
            self.bad_sizes.add(batch_size)
            return False
        self.evict(batch_size)
        self.graphs[batch_size] = CapturedGraph(batch_size, pool_id, static_in, self.model)
        return True

    def capture_all(self) -> int:
        done = 0
        for size in reversed(self.sizes):
            if size in self.graphs or size in self.bad_sizes:
                continue
            pool_id = self._pool_for()  # clean: near miss, every way puts it in graphs, where evict and close drop it
            if pool_id is None:
                break
            self.graphs[size] = CapturedGraph(size, pool_id, torch.zeros(size, self.hidden), self.model)
            done += 1
        return done

    def recapture(self, batch_size: int) -> bool:
        pool_id = self._pool_for()  # leak: the graph held before is overwritten without dropping its pool
        if pool_id is None:
            return False
        self.graphs[batch_size] = CapturedGraph(batch_size, pool_id, torch.zeros(batch_size, self.hidden), self.model)
        return True

    def attach_aux(self, batch_size: int) -> bool:
        graph = self.graphs.get(batch_size)
        if graph is None or graph.aux_pool is not None:
            return False
        graph.aux_pool = self.pools.create()  # leak: evict and close drop pool_id only and forget aux_pool
        return graph.aux_pool is not None

    def evict(self, batch_size: int) -> None:
        graph = self.graphs.pop(batch_size, None)
        if graph is not None:
            self.pools.drop(graph.pool_id)

    def padded(self, n: int) -> Optional[int]:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.streams.checkout()  # clean: near miss, the finally covers the eager return as well
        try:
            size = self.padded(x.shape[0])
            graph = self.graphs.get(size) if size is not None else None
            if graph is None:
                return self.model(x)
            graph.static_in[: x.shape[0]].copy_(x)
            return graph.run(graph.static_in)[: x.shape[0]]
        finally:
            self.streams.checkin(stream)

    def replay_checked(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        try:
            with self.streams.lent() as stream:  # leak: a RuntimeError handled here leaves the stream checked out
                logger.debug("replay on %d", stream)
                return self.model(x)
        except RuntimeError:
            return None

    def replay_many(self, batches: List[torch.Tensor]) -> List[torch.Tensor]:
        width = min(len(batches), self.streams.idle())
        if width == 0:
            return [self.model(x) for x in batches]
        lanes = [self.streams.checkout() for _ in range(width)]  # clean: near miss, all lanes are checked in one by one below
        outs: List[torch.Tensor] = []
        for i, x in enumerate(batches):
            logger.debug("batch %d on lane %d", i, lanes[i % width])
            outs.append(self.model(x))
        while lanes:
            self.streams.checkin(lanes.pop())
        return outs

    def probe_pool(self) -> bool:
        trial = self.pools.create()  # clean: near miss, dropped at once when it was got
        if trial is None:
            return False
        self.pools.drop(trial)
        return True

    def close(self) -> None:
        for size in list(self.graphs):
            self.evict(size)
        if self.shared is not None:
            self.pools.drop(self.shared)
            self.shared = None
