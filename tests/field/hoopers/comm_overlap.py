"""Overlap of collectives and compute in tensor-parallel layers.

CUDA events and side streams are expensive to make, so both are pooled.  An
event is recorded, waited for by somebody else and recycled when it has fired.
"""
import atexit
import functools
import logging
import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)

class StreamsExhausted(RuntimeError):
    ...

class CollectiveTimeout(RuntimeError):
    ...

class EventPool:
    def __init__(self, prealloc: int = 64) -> None:
        self._idle: Deque[Any] = deque(torch.cuda.Event() for _ in range(prealloc))
        self._lock = threading.Lock()
        self.created = prealloc

    def obtain(self):
        with self._lock:
            if self._idle:
                return self._idle.pop()  # clean: returned
            self.created += 1
        return torch.cuda.Event()  # clean: returned, recycle() takes it into the pool

    def recycle(self, ev) -> None:
        with self._lock:
            self._idle.append(ev)

class StreamPool:
    def __init__(self, n: int, low: int = 0) -> None:
        self._slots: List[Optional[Any]] = [torch.cuda.Stream() for _ in range(n)]
        self._prio: List[Any] = [torch.cuda.Stream(priority=-1) for _ in range(low)]
        self._cv = threading.Condition()

    def rent(self, high: bool = False):
        with self._cv:
            if high and self._prio:
                return self._prio.pop()  # clean: surrender() sorts it in by its priority
            for i, s in enumerate(self._slots):
                if s is not None:
                    self._slots[i] = None
                    return s
        raise StreamsExhausted("all side streams are rented")

    def surrender(self, stream) -> None:
        with self._cv:
            if stream.priority < 0:
                self._prio.append(stream)
            else:
                self._slots[self._slots.index(None)] = stream
            self._cv.notify()

    @contextmanager
    def side(self, high: bool = False):
        stream = self.rent(high)  # clean: finally
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            self.surrender(stream)

EVENTS = EventPool()
STREAMS = StreamPool(8, low=2)

def record(stream=None):
    """A recorded event on the stream; the caller recycles it."""
    ev = EVENTS.obtain()  # clean: returned
    ev.record(stream or torch.cuda.current_stream())
    return ev

def fence(producer, consumer) -> None:
    ev = record(producer)  # clean: recycled two lines further on
    consumer.wait_event(ev)
    EVENTS.recycle(ev)

def timed(name: str, sink: Dict[str, float]):
    def wrap(fn: Callable):
        @functools.wraps(fn)
        def inner(*args, **kw):
            start = torch.cuda.Event(enable_timing=True)  # clean: near miss, not from the pool and not kept
            end = torch.cuda.Event(enable_timing=True)  # clean: near miss, not from the pool and not kept
            start.record()
            out = fn(*args, **kw)
            end.record()
            end.synchronize()
            sink[name] = sink.get(name, 0.0) + start.elapsed_time(end)
            return out
        return inner
    return wrap

class PendingWork:
    """An asynchronous collective with the event that marks its end."""

    def __init__(self, work, ev, stream) -> None:
        self.work, self.ev, self.stream = work, ev, stream

    def finish(self) -> None:
        torch.cuda.current_stream().wait_event(self.ev)
        EVENTS.recycle(self.ev)
        STREAMS.surrender(self.stream)

def launch(fn: Callable, tensor) -> PendingWork:
    stream = STREAMS.rent()  # clean: near miss, goes with the PendingWork, finish() surrenders it
    with torch.cuda.stream(stream):
        work = fn(tensor, async_op=True)
    return PendingWork(work, record(stream), stream)  # clean: the event goes with the PendingWork

class RowParallel(nn.Module):
    def __init__(self, inner: nn.Module, group, chunks: int = 2) -> None:
        super().__init__()
        self.inner, self.group, self.chunks = inner, group, chunks

    def forward(self, x):
        pending: List[Tuple[PendingWork, Any]] = []
        try:
            for part in x.chunk(self.chunks, dim=0):
                y = self.inner(part)
                if y.numel() == 0:
                    continue
                pending.append((launch(functools.partial(dist.all_reduce, group=self.group), y), y))  # clean: near miss, the finally finishes each of them
        finally:
            for work, _ in pending:
                work.finish()
        return torch.cat([y for _, y in pending]) if pending else x

class GradReducer:
    """Buckets of gradients are reduced as they fill during backward."""

    def __init__(self, group, bucket_bytes: int = 25 << 20) -> None:
        self.group, self.bucket_bytes = group, bucket_bytes
        self._fill: Dict[torch.dtype, List[torch.Tensor]] = defaultdict(list)
        self._size: Dict[torch.dtype, int] = defaultdict(int)
        self._inflight: Dict[torch.dtype, PendingWork] = {}

    def add(self, grad: torch.Tensor) -> None:
        self._fill[grad.dtype].append(grad)
        self._size[grad.dtype] += grad.numel() * grad.element_size()
        if self._size[grad.dtype] >= self.bucket_bytes:
            self._reduce(grad.dtype)

    def _reduce(self, dtype: torch.dtype) -> None:
        flat = torch.cat([g.view(-1) for g in self._fill.pop(dtype)])
        self._size[dtype] = 0
        self._inflight[dtype] = launch(functools.partial(dist.all_reduce, group=self.group), flat)  # leak: a second full bucket of the same dtype overwrites the work in flight

    def synchronize(self) -> None:
        for dtype in [d for d, gs in self._fill.items() if gs]:
            if dtype in self._inflight:
                self._inflight.pop(dtype).finish()
            self._reduce(dtype)
        while self._inflight:
            _, work = self._inflight.popitem()
            work.finish()

class ExpertDispatch:
    def __init__(self, group, watchdog: float = 10.0) -> None:
        self.group, self.watchdog = group, watchdog
        self._callbacks: Deque[Tuple[Any, Callable[[bool], None]]] = deque()

    def exchange(self, send, recv):
        up = STREAMS.rent(high=True)  # leak: the second rent may raise StreamsExhausted while this one is held
        down = STREAMS.rent(high=True)  # clean: finally
        try:
            with torch.cuda.stream(up):
                dist.all_to_all_single(recv[0], send[0], group=self.group)
            with torch.cuda.stream(down):
                dist.all_to_all_single(recv[1], send[1], group=self.group)
            for s in (up, down):
                fence(s, torch.cuda.current_stream())
        finally:
            STREAMS.surrender(up)
            STREAMS.surrender(down)

    def exchange_or_local(self, send, recv) -> bool:
        try:
            self.exchange(send, recv)
            return True
        except StreamsExhausted:
            logger.debug("no streams, experts run locally")
            return False

    def combine(self, tokens, weights, on_done: Callable[[bool], None]) -> None:
        out = torch.einsum("te,teh->th", weights, tokens)
        ev = record()  # leak: poll() gives up on an event after CollectiveTimeout and never calls the callback that recycles it
        def fired(ok: bool) -> None:
            EVENTS.recycle(ev)
            on_done(ok and bool(torch.isfinite(out).all()))
        self._callbacks.append((ev, fired))

    def poll(self, now: float, started: float) -> int:
        n = 0
        while self._callbacks:
            ev, fired = self._callbacks[0]
            if not ev.query():
                if now - started > self.watchdog:
                    self._callbacks.popleft()
                    raise CollectiveTimeout(f"{now - started:.1f}s")
                break
            self._callbacks.popleft()
            fired(True)
            n += 1
        return n

class DoubleBuffer:
    """Host-to-device copies of the next batch behind the compute of this one."""

    def __init__(self, device) -> None:
        self.device = device
        self._stream = STREAMS.rent()  # clean: close() surrenders it
        self._ready = None
        self._next = None

    def stage(self, batch) -> None:
        with torch.cuda.stream(self._stream):
            self._next = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
        self._ready = record(self._stream)  # leak: staging twice without advance() in between rebinds the event

    def advance(self):
        if self._ready is None:
            return None
        torch.cuda.current_stream().wait_event(self._ready)
        EVENTS.recycle(self._ready)
        self._ready = None
        batch, self._next = self._next, None
        return batch

    def close(self) -> None:
        self.advance()
        STREAMS.surrender(self._stream)

def warm_kernels(layers: List[nn.Module], sample) -> int:
    done = 0
    for layer in layers:
        stream = STREAMS.rent()  # leak: a layer without parameters ends the round before surrender
        params = list(layer.parameters())
        if not params:
            continue
        with torch.cuda.stream(stream):
            layer(sample.to(params[0].dtype))
        fence(stream, torch.cuda.current_stream())
        STREAMS.surrender(stream)
        done += 1
    return done

atexit.register(lambda: logger.info("%d events made", EVENTS.created))
