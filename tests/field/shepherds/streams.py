# side streams, timing events and offload of activations. small and terse on purpose.
import threading
import weakref
from collections import deque
from contextlib import contextmanager

import torch

_tls = threading.local()

class Busy(Exception):
    pass

class StreamPool:
    def __init__(self, n, device=0):
        self.device, self.n = device, n
        self._q = deque(torch.cuda.Stream(device) for _ in range(n))
        self._names = {}

    def grab(self, who=""):
        if not self._q:
            raise Busy(who)
        s = self._q.popleft()  # clean: returned to the caller
        self._names[s] = who
        return s

    def grab_or_current(self, who=""):
        """(stream, owned)"""
        try:
            return self.grab(who), True  # clean: returned with the flag that says so
        except Busy:
            return torch.cuda.current_stream(self.device), False

    def toss(self, s):
        self._names.pop(s, None)
        self._q.append(s)

    @contextmanager
    def on(self, who=""):
        s = self.grab(who)  # clean: finally
        try:
            with torch.cuda.stream(s):
                yield s
        finally:
            self.toss(s)

class EventBin:
    def __init__(self, cap=256):
        self._bin, self.cap, self.live = [], cap, 0

    def get(self):
        e = self._bin.pop() if self._bin else torch.cuda.Event(enable_timing=True)  # clean: returned to the caller
        self.live += 1
        return e

    def put(self, e):
        self.live -= 1
        if len(self._bin) < self.cap:
            self._bin.append(e)

streams = StreamPool(8)
events = EventBin()

class Timer:
    """start()/stop() around a piece of work, ms() afterwards."""

    def __init__(self, label):
        self.label = label
        self.a = self.b = None

    def start(self):
        self.reset()
        self.a = events.get()  # clean: near miss, reset() has put back the pair of the last round
        self.a.record()
        return self

    def stop(self):
        if self.b is None:
            self.b = events.get()  # clean: None-check; reset() puts it back
        self.b.record()

    def ms(self):
        if self.b is None:
            return 0.0
        self.b.synchronize()
        return self.a.elapsed_time(self.b)

    def reset(self):
        for e in (self.a, self.b):
            if e is not None:
                events.put(e)
        self.a = self.b = None

class Profile:
    def __init__(self):
        self.marks = []

    def mark(self, name):
        e = events.get()  # leak: report() cuts off the first `skip` marks and loses their events
        e.record()
        self.marks.append((name, e))

    def report(self, skip=0):
        torch.cuda.synchronize()
        marks, self.marks = self.marks[skip:], []
        out = []
        for (n0, e0), (n1, e1) in zip(marks, marks[1:]):
            out.append((f"{n0}->{n1}", e0.elapsed_time(e1)))
        for _, e in marks:
            events.put(e)
        return out

class Offloaded:
    """a tensor on its way to the host and back"""

    def __init__(self, t):
        self.shape, self.dtype = t.shape, t.dtype
        self.host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        s, own = streams.grab_or_current("d2h")  # clean: near miss, tossed under the flag it came with
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            self.host.copy_(t, non_blocking=True)
        t.record_stream(s)
        self.gone = events.get()  # leak: after drop() fetch() returns None and nobody puts the event back
        self.gone.record(s)
        self.dropped = False
        if own:
            streams.toss(s)

    def fetch(self):
        if self.dropped:
            return None
        torch.cuda.current_stream().wait_event(self.gone)
        events.put(self.gone)
        self.gone = None
        return self.host.cuda(non_blocking=True)

    def drop(self):
        self.dropped = True
        self.host = None

class Offloader:
    """saved-tensor hooks: big activations go to the host"""

    def __init__(self, floor=1 << 20):
        self.floor, self.refs = floor, weakref.WeakSet()

    def pack(self, t):
        if t.numel() * t.element_size() < self.floor:
            return t
        o = Offloaded(t)
        self.refs.add(o)
        return o

    def unpack(self, o):
        return o.fetch() if isinstance(o, Offloaded) else o

    def abandon(self):
        for o in list(self.refs):
            o.drop()

def overlap(fns):
    """run fns on a stream each, as far as there are streams; wait for all"""
    taken = []
    for f in fns:
        s, own = streams.grab_or_current("overlap")  # clean: near miss, only owned ones go on the list that is tossed
        if own:
            taken.append(s)
        with torch.cuda.stream(s):
            f()
    for s in taken:
        torch.cuda.current_stream().wait_stream(s)
        streams.toss(s)

def overlap_strict(fns):
    taken = []
    for _ in fns:
        try:
            taken.append(streams.grab("strict"))  # leak: Busy is handled by running serially, with the streams so far kept
        except Busy:
            for f in fns:
                f()
            return False
    for s, f in zip(taken, fns):
        with torch.cuda.stream(s):
            f()
    for s in taken:
        s.synchronize()
        streams.toss(s)
    return True

def thread_stream():
    s = getattr(_tls, "s", None)
    if s is None:
        s = _tls.s = streams.grab(threading.current_thread().name)  # clean: near miss, end_thread() tosses it when the worker ends
    return s

def end_thread():
    s = getattr(_tls, "s", None)
    if s is not None:
        del _tls.s
        streams.toss(s)

def worker(q, fn):
    s = thread_stream()  # clean: end_thread() in finally
    try:
        while (item := q.get()) is not None:
            with torch.cuda.stream(s):
                fn(item)
    finally:
        end_thread()

def copy_rows(dst, src, rows):
    """scatter rows of src into dst on a side stream; returns the event to wait for"""
    s = streams.grab("rows")  # leak: no rows, no toss
    if not rows:
        return None
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        dst[rows] = src
    e = events.get()  # clean: goes to the caller, see copy_rows_sync
    e.record(s)
    streams.toss(s)
    return e

def copy_rows_sync(dst, src, rows):
    e = copy_rows(dst, src, rows)  # clean: near miss, put back unless it is None
    if e is not None:
        e.synchronize()
        events.put(e)

def timed(fn, x):
    t = Timer(fn.__name__).start()
    try:
        y = fn(x)
        t.stop()
        return y, t.ms()
    finally:
        t.reset()

def best_of(variants, x, rounds=3):
    """fastest variant; broken ones are skipped"""
    best, t_best = None, 1e9
    for v in variants:
        a, b = events.get(), events.get()  # leak: a variant that raises RuntimeError is skipped with its pair
        try:
            v(x)
            a.record()
            for _ in range(rounds):
                v(x)
            b.record()
        except RuntimeError:
            continue
        b.synchronize()
        t = a.elapsed_time(b)
        events.put(a)
        events.put(b)
        if t < t_best:
            best, t_best = v, t
    return best
