"""Side streams and copy permits for overlapping attention with host traffic."""
import contextlib
import functools
import queue
import threading

import torch


class StreamBank:
    """CUDA streams in a queue; waiting for one is blocking unless asked otherwise."""

    def __init__(self, n, device=None):
        self.q = queue.LifoQueue()
        for _ in range(n):
            self.q.put(torch.cuda.Stream(device))

    def get_stream(self):
        return self.q.get()

    def poll_stream(self):
        try:
            return self.q.get_nowait()
        except queue.Empty:
            return None

    def put_stream(self, s):
        self.q.put(s)

    @contextlib.contextmanager
    def using(self, after=None):
        s = self.q.get()  # clean: put back in finally
        try:
            if after is not None:
                s.wait_stream(after)
            with torch.cuda.stream(s):
                yield s
        finally:
            self.q.put(s)


class CopyPermits:
    """Bounds the bytes in flight; small copies pass without a permit."""

    def __init__(self, n, small=4096):
        self.sem = threading.Semaphore(n)
        self.small = small

    def enter(self, nbytes):
        """True when a permit was taken."""
        if nbytes < self.small:
            return False
        self.sem.acquire()  # clean: near miss, the caller calls leave() when this returns True
        return True

    def leave(self):
        self.sem.release()


class Offloader:
    def __init__(self, bank, permits):
        self.bank = bank
        self.permits = permits
        self.jobs = {}

    def offload(self, t):
        held = self.permits.enter(t.numel() * t.element_size())  # clean: near miss, left in finally when held
        try:
            with self.bank.using(torch.cuda.current_stream()) as s:  # clean: with block
                host = t.to("cpu", non_blocking=True)
                t.record_stream(s)
            return host
        finally:
            if held:
                self.permits.leave()

    def offload_sparse(self, t):
        held = self.permits.enter(t.numel() * t.element_size())  # leak: an all-zero tensor returns with the permit
        if not bool(t.any()):
            return torch.zeros(t.shape, dtype=t.dtype)
        host = t.to("cpu")
        if held:
            self.permits.leave()
        return host

    def submit(self, name, t):
        if name in self.jobs:
            raise KeyError(name)
        s = self.bank.get_stream()  # clean: kept in jobs, collect() puts it back
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            host.copy_(t, non_blocking=True)
        self.jobs[name] = (s, host)
        return host

    def collect(self, name):
        s, host = self.jobs.pop(name)
        s.synchronize()
        self.bank.put_stream(s)
        return host

    def prefetch(self, tensors, budget):
        out = []
        for t in tensors:
            s = self.bank.poll_stream()  # leak: over budget breaks out with the stream
            if s is None:
                break
            budget -= t.numel()
            if budget < 0:
                break
            with torch.cuda.stream(s):
                out.append(t.to("cuda", non_blocking=True))
            s.synchronize()
            self.bank.put_stream(s)
        return out

    def try_overlap(self, compute, t):
        s = self.bank.poll_stream()  # leak: not put back when no permit is free
        if s is None:
            return compute(), t.cpu()
        if not self.permits.sem.acquire(blocking=False):  # clean: released at the end
            return compute(), t.cpu()
        with torch.cuda.stream(s):
            host = t.to("cpu", non_blocking=True)
        y = compute()
        s.synchronize()
        self.permits.sem.release()
        self.bank.put_stream(s)
        return y, host


class SideStream:
    """Owns its stream only when none is passed in."""

    def __init__(self, bank, stream=None):
        self.bank = bank
        self.owned = stream is None
        self.stream = bank.get_stream() if self.owned else stream  # clean: near miss, close() puts back what is owned

    def close(self):
        if self.owned and self.stream is not None:
            self.bank.put_stream(self.stream)
        self.stream = None

    def __enter__(self):
        return self.stream

    def __exit__(self, *exc):
        self.close()


class StickyStream:
    """Like SideStream; detached streams are put back by whoever calls close()."""

    def __init__(self, bank, stream=None):
        self.bank = bank
        self.owned = False
        if stream is None:
            stream = bank.get_stream()  # leak: owned stays False, so close() never puts it back
        self.stream = stream

    def close(self):
        if self.owned:
            self.bank.put_stream(self.stream)
        self.stream = None


def cached_side_stream(bank, cache):
    """Decorator: results are cached by the first argument."""
    def wrap(fn):
        @functools.wraps(fn)
        def inner(key, *args):
            s = bank.get_stream()  # leak: a cached result is returned before the try
            if key in cache:
                return cache[key]
            try:
                with torch.cuda.stream(s):
                    cache[key] = fn(key, *args)
                return cache[key]
            finally:
                bank.put_stream(s)
        return inner
    return wrap


def fan_out(bank, fns):
    streams, results = [], []
    for fn in fns:
        s = bank.get_stream()  # clean: all of streams is put back after the barrier
        streams.append(s)
        with torch.cuda.stream(s):
            results.append(fn())
    main = torch.cuda.current_stream()
    for s in streams:
        main.wait_stream(s)
    for s in streams:
        bank.put_stream(s)
    return results


def fan_out_pairs(bank, fns):
    last = None
    results = []
    for fn in fns:
        last = bank.get_stream()  # leak: each turn rebinds last, only the final stream is put back
        with torch.cuda.stream(last):
            results.append(fn())
    if last is not None:
        torch.cuda.current_stream().wait_stream(last)
        bank.put_stream(last)
    return results


def copy_with_callback(bank, t, done):
    s = bank.get_stream()  # clean: near miss, the thread's target puts it back

    def wait():
        try:
            s.synchronize()
            done(host)
        finally:
            bank.put_stream(s)

    with torch.cuda.stream(s):
        host = t.to("cpu", non_blocking=True)
    worker = threading.Thread(target=wait, daemon=True)
    worker.start()
    return worker
