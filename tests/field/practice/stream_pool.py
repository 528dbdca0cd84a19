"""CUDA side streams, handed out per priority, plus helpers for overlapped copies."""
import logging
import typing as T
from contextlib import contextmanager, nullcontext

import torch

logger = logging.getLogger(__name__)


class StreamPool:
    def __init__(self, low: int = 4, high: int = 2) -> None:
        self._streams: T.Dict[str, T.List[torch.cuda.Stream]] = {
            "low": [torch.cuda.Stream(priority=0) for _ in range(low)],
            "high": [torch.cuda.Stream(priority=-1) for _ in range(high)],
        }
        self._kind: T.Dict[int, str] = {}

    def checkout(self, kind: str = "low") -> T.Optional[torch.cuda.Stream]:
        if not self._streams[kind]:
            return None
        s = self._streams[kind].pop(0)
        self._kind[s.stream_id] = kind
        return s

    def checkin(self, s: torch.cuda.Stream) -> None:
        self._streams[self._kind.pop(s.stream_id)].append(s)

    def checkout_any(self) -> T.Optional[torch.cuda.Stream]:
        s = self.checkout("high")  # clean: near miss, `or` goes on only without a stream
        return s or self.checkout("low")  # clean: returned

    @contextmanager
    def use(self, kind: str = "low"):
        s = self.checkout(kind)  # clean: checked in after the block if there was one
        ctx = nullcontext() if s is None else torch.cuda.stream(s)
        try:
            with ctx:
                yield s
        finally:
            if s:
                self.checkin(s)


def overlapped_copy(pool: StreamPool, src: T.Sequence[torch.Tensor], dst: T.Sequence[torch.Tensor]) -> None:
    s = pool.checkout()  # leak: an empty source returns between checkout and checkin
    if s is None:
        for a, b in zip(src, dst):
            b.copy_(a)
        return
    if not src:
        return
    with torch.cuda.stream(s):
        for a, b in zip(src, dst):
            b.copy_(a, non_blocking=True)
    s.synchronize()
    pool.checkin(s)


def overlapped_copy_wide(pool: StreamPool, src, dst, width: int) -> int:
    streams = []
    for _ in range(width):
        s = pool.checkout_any()  # clean: near miss, partial success is used and checked in
        if s is None:
            break
        streams.append(s)
    if not streams:
        return 0
    for i, (a, b) in enumerate(zip(src, dst)):
        with torch.cuda.stream(streams[i % len(streams)]):
            b.copy_(a, non_blocking=True)
    for s in streams:
        s.synchronize()
        pool.checkin(s)
    return len(streams)


def exact_streams(pool: StreamPool, n: int) -> T.Optional[T.List[torch.cuda.Stream]]:
    got: T.List[torch.cuda.Stream] = []
    while len(got) < n:
        s = pool.checkout()  # leak: fewer than n gives None and keeps those
        if s is None:
            logger.warning("wanted %d streams, got %d", n, len(got))
            return None
        got.append(s)
    return got


def run_graph_breaks(pool: StreamPool, parts: T.Iterable[T.Callable[[], None]], n: int) -> bool:
    streams = exact_streams(pool, n)  # leak: the last one of the list is not checked in
    if streams is None:
        return False
    for i, part in enumerate(parts):
        with torch.cuda.stream(streams[i % n]):
            part()
    for s in streams[:-1]:
        pool.checkin(s)
    return True


class Prefetcher:
    def __init__(self, pool: StreamPool, loader: T.Iterable[torch.Tensor]) -> None:
        self.pool = pool
        self.loader = loader
        self.stream: T.Optional[torch.cuda.Stream] = None

    def __iter__(self) -> T.Iterator[torch.Tensor]:
        self.stream = self.pool.checkout("high")  # clean: near miss, finally of the generator checks it in, also after break
        try:
            nxt = None
            for cpu in self.loader:
                with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                    cur = cpu.cuda(non_blocking=True)
                if nxt is not None:
                    yield nxt
                nxt = cur
            if nxt is not None:
                yield nxt
        finally:
            if self.stream is not None:
                self.pool.checkin(self.stream)
                self.stream = None

    def pairs(self) -> T.Iterator[T.Tuple[torch.Tensor, torch.Tensor]]:
        s = self.pool.checkout("high")  # leak: an odd element ends the generator before checkin
        it = iter(self.loader)
        for a in it:
            b = next(it, None)
            if b is None:
                return
            yield a, b
        if s is not None:
            self.pool.checkin(s)

    def total(self) -> float:
        acc = 0.0
        for x in self.loader:
            with self.pool.use("low") as s:  # clean: with block, continue included
                if s is None:
                    continue
                acc += float(x.cuda(non_blocking=True).sum())
        return acc

    def measure(self) -> int:
        s = self.pool.checkout_any()  # leak: replaced by its id
        s = s.stream_id if s is not None else -1
        return s
