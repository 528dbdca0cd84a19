"""Side streams and events for overlapping copies with compute."""
from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

try:
    import torch
except ImportError:
    torch = None

log = logging.getLogger("overlap.streams")


class SideStream:
    def __init__(self, index: int) -> None:
        self.index = index
        self.raw: Any = torch.cuda.Stream() if torch is not None and torch.cuda.is_available() else None
        self.ops: List[str] = []

    def enqueue(self, op: str) -> None:
        self.ops.append(op)

    def synchronize(self) -> None:
        if self.raw is not None:
            self.raw.synchronize()
        self.ops.clear()


class StreamPool:
    def __init__(self, n: int) -> None:
        self._streams = [SideStream(i) for i in range(n)]
        self._idle = list(self._streams)

    def lease(self) -> SideStream:
        if not self._idle:
            raise LookupError("no idle side stream")
        return self._idle.pop(0)

    def unlease(self, s: SideStream) -> None:
        s.synchronize()
        self._idle.append(s)

    @contextmanager
    def scoped(self) -> Iterator[SideStream]:
        s = self.lease()  # clean: finally around the yield
        try:
            yield s
        finally:
            self.unlease(s)

    @contextmanager
    def scoped_unless_busy(self, busy: Callable[[SideStream], bool]) -> Iterator[Optional[SideStream]]:
        s = self.lease()  # leak: the busy way yields None and returns without unlease
        if busy(s):
            yield None
            return
        try:
            yield s
        finally:
            self.unlease(s)

    def idle(self) -> int:
        return len(self._idle)


class EventPool:
    def __init__(self) -> None:
        self._spare: List[Any] = []
        self.live = 0

    def take_event(self) -> Any:
        self.live += 1
        if self._spare:
            return self._spare.pop()
        return torch.cuda.Event() if torch is not None and torch.cuda.is_available() else object()

    def return_event(self, ev: Any) -> None:
        self.live -= 1
        self._spare.append(ev)


class CopyScope:
    """`with CopyScope(pool) as s:` runs copies on s and joins at exit."""

    def __init__(self, pool: StreamPool, join: bool = True) -> None:
        self.pool = pool
        self.join = join
        self._stream: Optional[SideStream] = None

    def __enter__(self) -> SideStream:
        self._stream = self.pool.lease()  # leak: exit returns early when join is off
        return self._stream

    def __exit__(self, *exc: object) -> None:
        if not self.join:
            return
        self._stream.synchronize()
        self.pool.unlease(self._stream)


class ComputeScope:
    def __init__(self, pool: StreamPool, stream: Optional[SideStream] = None) -> None:
        self.pool = pool
        self._borrowed = stream is not None
        self._stream = stream

    def __enter__(self) -> SideStream:
        if not self._borrowed:
            self._stream = self.pool.lease()  # clean: near miss, exit returns early only for a stream that is not its own
        return self._stream

    def __exit__(self, *exc: object) -> None:
        if self._borrowed:
            return
        self.pool.unlease(self._stream)
        self._stream = None


class PendingCopies:
    def __init__(self, streams: StreamPool, events: EventPool) -> None:
        self.streams = streams
        self.events = events
        self._by_key: Dict[str, Any] = {}

    def launch(self, key: str, nbytes: int) -> None:
        with self.streams.scoped() as s:  # clean: with
            s.enqueue(f"copy {key} {nbytes}")
            ev = self.events.take_event()  # clean: near miss, the displaced entry is returned first, the rest by wait
            old = self._by_key.pop(key, None)
            if old is not None:
                self.events.return_event(old)
            self._by_key[key] = ev

    def wait(self, key: str) -> bool:
        ev = self._by_key.pop(key, None)
        if ev is None:
            return False
        self.events.return_event(ev)
        return True

    def wait_all(self) -> None:
        for key in list(self._by_key):
            self.wait(key)


class LayerTimer:
    def __init__(self, events: EventPool) -> None:
        self.events = events
        self._open: Dict[str, Any] = {}
        self.pairs: List[tuple] = []

    def start(self, layer: str) -> None:
        self._open[layer] = self.events.take_event()  # leak: flush returns only the end events

    def stop(self, layer: str) -> None:
        begin = self._open.pop(layer)
        end = self.events.take_event()  # clean: kept in pairs, returned by flush
        self.pairs.append((begin, end))

    def flush(self) -> int:
        n = 0
        for begin, end in self.pairs:
            if begin is not end:
                n += 1
            self.events.return_event(end)
        self.pairs = []
        return n


def broadcast_weights(pool: StreamPool, names: List[str], two_lanes: bool) -> int:
    lane_a = pool.lease()  # clean: unleased at the end
    lane_b = pool.lease() if two_lanes else lane_a  # clean: near miss, unleased when it is a lane of its own
    for i, n in enumerate(names):
        (lane_a if i % 2 == 0 else lane_b).enqueue(n)
    done = len(lane_a.ops) + (len(lane_b.ops) if two_lanes else 0)
    if lane_b is not lane_a:
        pool.unlease(lane_b)
    pool.unlease(lane_a)
    return done


def prefetch_weights(pool: StreamPool, names: List[str], resident: Callable[[str], bool]) -> int:
    moved = 0
    stream = pool.lease()  # leak: rebound by the lane change inside the loop
    for n in names:
        if resident(n):
            continue
        if len(stream.ops) >= 2:
            stream = pool.lease()  # leak: another lane change rebinds it too
        stream.enqueue(n)
        moved += 1
    pool.unlease(stream)
    return moved


def fan_out(pool: StreamPool, shards: List[str]) -> int:
    with ExitStack() as stack:
        streams = []
        for _ in shards:
            s = pool.lease()  # clean: near miss, the ExitStack callback unleases
            stack.callback(pool.unlease, s)
            streams.append(s)
        for s, shard in zip(streams, shards):
            s.enqueue(shard)
        return sum(len(s.ops) for s in streams)


def try_overlap(pool: StreamPool, op: str) -> bool:
    try:
        copy = pool.lease()  # leak: the second lease can fail, that is caught and answered with False
        compute = pool.lease()  # clean: the last thing that can fail here
    except LookupError:
        log.debug("running %s without overlap", op)
        return False
    copy.enqueue(op)
    compute.enqueue(op)
    pool.unlease(compute)
    pool.unlease(copy)
    return True


def main() -> None:
    streams = StreamPool(8)
    events = EventPool()
    pc = PendingCopies(streams, events)
    pc.launch("w0", 128)
    pc.launch("w0", 256)
    pc.wait_all()
    with CopyScope(streams) as s:  # clean: with
        s.enqueue("h2d")
        with ComputeScope(streams, s) as c:  # clean: with
            c.enqueue("gemm")
    t = LayerTimer(events)
    t.start("l0")
    t.stop("l0")
    t.flush()
    with streams.scoped_unless_busy(lambda s: bool(s.ops)) as s:  # clean: with
        if s is not None:
            s.enqueue("d2h")
    print(broadcast_weights(streams, ["a", "b"], True), prefetch_weights(streams, ["a", "b"], lambda n: False), fan_out(streams, ["x", "y"]), try_overlap(streams, "op"))
    print("idle", streams.idle(), "events", events.live)


if __name__ == "__main__":
    main()
