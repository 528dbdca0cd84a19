"""Side streams and events for overlapping adapter weight prefetch with compute."""
from __future__ import annotations

import queue
from typing import Any, Callable, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


class HostStream:
    """Stands in for torch.cuda.Stream on machines without a device."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[[], Any]) -> None:
        self.pending.append(fn)

    def synchronize(self) -> list[Any]:
        done = [fn() for fn in self.pending]
        self.pending.clear()
        return done

    def query(self) -> bool:
        return not self.pending


class StreamPool:
    def __init__(self, size: int) -> None:
        self._q: queue.SimpleQueue[HostStream] = queue.SimpleQueue()
        for _ in range(size):
            self._q.put(HostStream())
        self.size = size

    def get_stream(self) -> Optional[HostStream]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def put_stream(self, stream: HostStream) -> None:
        self._q.put(stream)

    @property
    def available(self) -> int:
        return self._q.qsize()


class SideStream:
    """``with SideStream(pool) as s`` runs on s, or inline when the pool is empty."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self._stream: Optional[HostStream] = None

    def __enter__(self) -> Optional[HostStream]:
        self._stream = self._pool.get_stream()  # clean: near miss, exit returns early only when there is none
        return self._stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._stream is None:
            return False
        if exc_type is None:
            self._stream.synchronize()
        else:
            self._stream.pending.clear()
        self._pool.put_stream(self._stream)
        self._stream = None
        return False


class PrefetchScope:
    def __init__(self, pool: StreamPool, layer: int) -> None:
        self._pool = pool
        self.layer = layer
        self.stream: Optional[HostStream] = None

    def __enter__(self) -> "PrefetchScope":
        self.stream = self._pool.get_stream()  # leak: exit returns early when nothing is pending on the stream
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.stream is None or self.stream.query():
            return False
        self.stream.synchronize()
        self._pool.put_stream(self.stream)
        return False


class CaptureScope:
    """Graph capture that swallows capture errors and falls back to eager."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self._stream: Optional[HostStream] = None
        self.captured = False

    def __enter__(self) -> HostStream:
        self._stream = self._pool.get_stream() or HostStream()  # leak: exit swallows a RuntimeError and returns before put
        return self._stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        assert self._stream is not None
        if exc_type is not None and issubclass(exc_type, RuntimeError):
            self._stream.pending.clear()
            return True
        self.captured = exc_type is None
        self._stream.synchronize()
        self._pool.put_stream(self._stream)
        return False


class WeightPrefetcher:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self._inflight: dict[int, HostStream] = {}
        self.loaded: dict[int, list[Any]] = {}

    def start(self, layer: int, load: Callable[[], Any]) -> bool:
        if layer in self._inflight:
            return True
        stream = self.pool.get_stream()  # clean: kept in the inflight table, wait gives it back
        if stream is None:
            return False
        stream.submit(load)
        self._inflight[layer] = stream
        return True

    def wait(self, layer: int) -> Optional[list[Any]]:
        stream = self._inflight.pop(layer, None)
        if stream is None:
            return self.loaded.get(layer)
        self.loaded[layer] = stream.synchronize()
        self.pool.put_stream(stream)
        return self.loaded[layer]

    def close(self) -> None:
        for layer in list(self._inflight):
            self.wait(layer)


class AdapterPrefetcher:
    def __init__(self, pool: StreamPool) -> None:
        self.pool = pool
        self._by_name: dict[str, HostStream] = {}

    def start(self, name: str, load: Callable[[], Any]) -> bool:
        stream = self.pool.get_stream()  # leak: a second start of the same name overwrites, cancel drops the entry
        if stream is None:
            return False
        stream.submit(load)
        self._by_name[name] = stream
        return True

    def cancel(self, name: str) -> None:
        self._by_name.pop(name, None)

    def wait(self, name: str) -> list[Any]:
        stream = self._by_name.pop(name, None)
        if stream is None:
            return []
        done = stream.synchronize()
        self.pool.put_stream(stream)
        return done


def copy_layers(pool: StreamPool, layers: Sequence[Callable[[], Any]]) -> list[Any]:
    out: list[Any] = []
    with SideStream(pool) as s:  # clean: near miss, None runs inline
        for load in layers:
            if s is None:
                out.append(load())
                continue
            s.submit(load)
        if s is not None:
            out.extend(s.synchronize())
    return out


def fan_out(pool: StreamPool, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Round-robin over as many streams as there are."""
    streams: list[HostStream] = []
    while len(streams) < len(jobs):
        s = pool.get_stream()  # clean: near miss, collected in streams which are all put back
        if s is None:
            break
        streams.append(s)
    if not streams:
        return [job() for job in jobs]
    for i, job in enumerate(jobs):
        streams[i % len(streams)].submit(job)
    results: list[Any] = []
    while streams:
        s = streams.pop()
        results.extend(s.synchronize())
        pool.put_stream(s)
    return results


def time_overlap(pool: StreamPool, compute: Callable[[], int], load: Callable[[], int]) -> Optional[int]:
    main_s = pool.get_stream()  # leak: a missing side stream returns without putting this one back
    if main_s is None:
        return None
    side_s = pool.get_stream()  # clean: put back at the end
    if side_s is None:
        return None
    main_s.submit(compute)
    side_s.submit(load)
    total = sum(main_s.synchronize()) + sum(side_s.synchronize())
    pool.put_stream(side_s)
    pool.put_stream(main_s)
    return total


def run_on_idle(pool: StreamPool, job: Callable[[], Any], tries: int = 3) -> Any:
    for _ in range(tries):
        stream = pool.get_stream()  # clean: near miss, a busy one is put back before the retry
        if stream is None:
            break
        if not stream.query():
            pool.put_stream(stream)
            continue
        stream.submit(job)
        result = stream.synchronize()[-1]
        pool.put_stream(stream)
        return result
    return job()


def main() -> None:
    pool = StreamPool(3)
    pre = WeightPrefetcher(pool)
    pre.start(0, lambda: "w0")
    pre.start(1, lambda: "w1")
    pre.wait(0)
    pre.close()
    copy_layers(pool, [lambda: 1, lambda: 2])
    fan_out(pool, [lambda: i for i in range(5)])
    run_on_idle(pool, lambda: 7)
    print("available", pool.available, "of", pool.size)


if __name__ == "__main__":
    main()
