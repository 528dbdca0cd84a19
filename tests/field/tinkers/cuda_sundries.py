"""Small CUDA object pools of the Anvil runtime: events, streams, graphs, workspaces, handles."""
from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import defaultdict
from typing import Dict, List, Optional, Set, Tuple

try:
    import torch
except ImportError:
    torch = None


class _FakeEvent:
    def record(self, stream=None) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


def _new_event():
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.Event(enable_timing=True)
    return _FakeEvent()


class EventBin:
    """Timing events are dear to make, so they go round. Grown in batches, never shrunk."""

    def __init__(self, batch: int = 16, most: int = 1024) -> None:
        self._batch = batch
        self._most = most
        self._made = 0
        self._bin: List = []

    def pick(self):
        if not self._bin:
            if self._made + self._batch > self._most:
                raise RuntimeError("event bin: limit is reached")
            self._bin.extend(_new_event() for _ in range(self._batch))
            self._made += self._batch
        return self._bin.pop()

    def recycle(self, *events) -> None:
        self._bin.extend(events)
        if len(self._bin) > self._made:
            raise RuntimeError("event bin: more events than were made")


def time_call(events: EventBin, fn) -> float:
    start = events.pick()  # clean: recycled with the end event
    end = events.pick()  # clean: recycled with the start event
    start.record()
    fn()
    end.record()
    end.synchronize()
    spent = start.elapsed_time(end)
    events.recycle(start, end)
    return spent


class StepTimer:
    def __init__(self, events: EventBin) -> None:
        self.events = events
        self.marks: List = []

    def mark(self) -> None:
        event = self.events.pick()  # leak: report drops the list and recycles only the first and the last mark
        event.record()
        self.marks.append(event)

    def report(self) -> float:
        first, last = self.marks[0], self.marks[-1]
        last.synchronize()
        spent = first.elapsed_time(last)
        self.marks = []
        self.events.recycle(first, last)
        return spent


def wait_any(events: EventBin, streams, ready) -> Optional[object]:
    event = events.pick()  # leak: the first ready stream is returned before the recycle
    for stream in streams:
        event.record(stream)
        if ready(event):
            return stream
    events.recycle(event)
    return None


class StreamRack:
    """One side stream for a worker thread, hooked by thread id."""

    def __init__(self, streams: List) -> None:
        self._rack = list(streams)
        self._hooked: Dict[int, object] = {}
        self._mu = threading.Lock()

    def hook(self, thread_id: int):
        with self._mu:
            if thread_id in self._hooked:
                raise KeyError(f"thread {thread_id} has a stream")
            if not self._rack:
                raise RuntimeError("rack is bare")
            stream = self._rack.pop(0)
            self._hooked[thread_id] = stream
            return stream

    def unhook(self, thread_id: int) -> None:
        with self._mu:
            self._rack.append(self._hooked.pop(thread_id))


def worker_main(rack: StreamRack, inbox) -> None:
    me = threading.get_ident()
    stream = rack.hook(me)  # clean: unhooked when the loop ends, however it ends
    try:
        for job in iter(inbox.get, None):
            if job.cancelled:
                continue
            job.run(stream)
    finally:
        rack.unhook(me)


def one_shot(rack: StreamRack, job) -> bool:
    me = threading.get_ident()
    stream = rack.hook(me)  # leak: the caught error of the job logs and returns while hooked
    try:
        job.run(stream)
    except RuntimeError as err:
        job.log(err)
        return False
    rack.unhook(me)
    return True


class GraphEntry:
    """A place on the shelf for one captured graph; it is installed or forfeited."""

    __slots__ = ("shelf", "shape", "graph")

    def __init__(self, shelf: "GraphShelf", shape: Tuple[int, ...]) -> None:
        self.shelf = shelf
        self.shape = shape
        self.graph = None

    def install(self, graph) -> None:
        self.graph = graph
        self.shelf._pending.discard(self.shape)
        self.shelf._graphs[self.shape] = graph

    def forfeit(self) -> None:
        self.shelf._pending.discard(self.shape)


class GraphShelf:
    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._pending: Set[Tuple[int, ...]] = set()
        self._graphs: Dict[Tuple[int, ...], object] = {}

    def earmark(self, shape: Tuple[int, ...]) -> Optional[GraphEntry]:
        """A place for this shape, or None when the shelf is full or someone captures it now."""
        if shape in self._pending or shape in self._graphs:
            return None
        if len(self._pending) + len(self._graphs) >= self._at_most:
            return None
        self._pending.add(shape)
        return GraphEntry(self, shape)

    def graph(self, shape):
        return self._graphs.get(shape)


def capture(shelf: GraphShelf, shape, recorder) -> bool:
    entry = shelf.earmark(shape)  # leak: a recorder without memory returns False and the shape stays pending
    if entry is None:
        return False
    if recorder.free_bytes() < recorder.estimate(shape):
        return False
    entry.install(recorder.record(shape))
    return True


def capture_all(shelf: GraphShelf, shapes, recorder) -> int:
    n = 0
    for shape in shapes:
        entry = shelf.earmark(shape)  # clean: forfeited on the error, installed else
        if entry is None:
            continue
        try:
            graph = recorder.record(shape)
        except RuntimeError:
            entry.forfeit()
            continue
        entry.install(graph)
        n += 1
    return n


class Workspaces:
    """Kernel workspaces in size buckets, as bytearrays or CUDA tensors."""

    BUCKETS = (1 << 16, 1 << 20, 1 << 24)

    def __init__(self) -> None:
        self._buckets: Dict[int, list] = defaultdict(list)
        self._bytes_out = 0
        self.high_water = 0

    def _bucket(self, nbytes: int) -> int:
        for size in self.BUCKETS:
            if nbytes <= size:
                return size
        raise ValueError(f"{nbytes} bytes is over the largest bucket")

    def alloc(self, nbytes: int):
        size = self._bucket(nbytes)
        self._bytes_out += size
        self.high_water = max(self.high_water, self._bytes_out)
        if self._buckets[size]:
            return self._buckets[size].pop()
        return bytearray(size)

    def free(self, ws) -> None:
        self._bytes_out -= len(ws)
        self._buckets[len(ws)].append(ws)

    @contextlib.contextmanager
    def using(self, nbytes: int):
        ws = self.alloc(nbytes)
        try:
            yield ws
        finally:
            self.free(ws)


def gemm(workspaces: Workspaces, lib, a, b):
    with workspaces.using(lib.workspace_size(a, b)) as ws:  # clean: freed by the context manager
        return lib.gemm(a, b, ws)


def autotune(workspaces: Workspaces, lib, a, b) -> Optional[int]:
    best, best_time = None, float("inf")
    for algo in lib.algos(a, b):
        ws = workspaces.alloc(lib.size_of(algo))  # leak: an unsupported algorithm continues with its workspace
        spent = lib.try_algo(algo, a, b, ws)
        if spent is None:
            continue
        if spent < best_time:
            best, best_time = algo, spent
        workspaces.free(ws)
    return best


class GrowingWorkspace:
    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces = workspaces
        self.ws = workspaces.alloc(1)  # clean: freed by ensure when it grows and by close at last

    def ensure(self, nbytes: int):
        if nbytes > len(self.ws):
            bigger = self.workspaces.alloc(nbytes)  # clean: near miss, takes the field after the old one is freed
            self.workspaces.free(self.ws)
            self.ws = bigger
        return self.ws

    def close(self) -> None:
        self.workspaces.free(self.ws)


class BlasHandles:
    """Library handles as c_void_p values, made and destroyed through the C interface."""

    def __init__(self, lib, most: int = 8) -> None:
        self._lib = lib
        self._most = most
        self._values: Set[int] = set()

    def mint(self) -> ctypes.c_void_p:
        if len(self._values) >= self._most:
            raise RuntimeError("too many handles")
        handle = ctypes.c_void_p()
        status = self._lib.blasCreate(ctypes.byref(handle))
        if status != 0:
            raise RuntimeError(f"blasCreate: {status}")
        self._values.add(handle.value)
        return handle

    def melt(self, handle: ctypes.c_void_p) -> None:
        self._values.remove(handle.value)
        self._lib.blasDestroy(handle)


def norm(handles: BlasHandles, lib, x) -> float:
    handle = handles.mint()  # leak: a bad status returns nan before the handle is melted
    out = ctypes.c_float()
    if lib.nrm2(handle, x, ctypes.byref(out)) != 0:
        return float("nan")
    handles.melt(handle)
    return out.value


class Solver:
    def __init__(self, handles: BlasHandles) -> None:
        self._handles = handles
        self._by_device: Dict[int, ctypes.c_void_p] = {}

    def handle(self, device: int) -> ctypes.c_void_p:
        if device not in self._by_device:
            self._by_device[device] = self._handles.mint()  # clean: kept by device, melted in shutdown
        return self._by_device[device]

    def shutdown(self) -> None:
        for handle in self._by_device.values():
            self._handles.melt(handle)
        self._by_device.clear()


class TunedConfigs:
    """Best launch configuration by kernel and shape, kept for good."""

    def __init__(self) -> None:
        self._best: Dict[Tuple[str, int], Tuple[int, int]] = {}

    def get(self, kernel: str, n: int) -> Tuple[int, int]:
        return self._best.get((kernel, n), (128, 4))

    def put(self, kernel: str, n: int, config: Tuple[int, int]) -> None:
        self._best[(kernel, n)] = config


def launch(configs: TunedConfigs, kernel, n: int) -> bool:
    config = configs.get(kernel.name, n)  # clean: a table of settings
    if n == 0:
        return False
    kernel.launch(n, *config)
    return True
