"""Side streams and events. Creating either costs a driver call, so both are kept."""
import logging
import os
import queue
import threading
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)
MAX_SIDE = int(os.environ.get("RT_SIDE_STREAMS", "8"))

_idle = {}          # device index -> [stream]
_events = []        # recorded and waited for, ready for reuse
_fences = {}        # name -> event
_times = []         # (name, start, stop)
_totals = {}
_watch = queue.Queue()
_live = 0
_mu = threading.Lock()


class OutOfStreams(RuntimeError):
    pass


def grab(dev, prio=0):
    """A side stream of a device; OutOfStreams if too many are in use."""
    global _live
    with _mu:
        lst = _idle.setdefault(dev, [])
        if _live >= MAX_SIDE:
            raise OutOfStreams(f"cuda:{dev}: {_live} side streams in use")
        _live += 1
        for i, s in enumerate(lst):
            if s.priority == prio:
                return lst.pop(i)  # clean: returned
    return torch.cuda.Stream(dev, priority=prio)


def put(s):
    global _live
    with _mu:
        _idle.setdefault(s.device_index, []).append(s)
        _live -= 1


def event(timing=False):
    with _mu:
        if _events and not timing:
            return _events.pop()  # clean: returned
    return torch.cuda.Event(enable_timing=timing)


def retire(ev):
    with _mu:
        _events.append(ev)


@contextmanager
def side(dev, prio=0):
    s = grab(dev, prio)  # clean: put in the finally
    s.wait_stream(torch.cuda.current_stream(dev))
    try:
        with torch.cuda.stream(s):
            yield s
    finally:
        torch.cuda.current_stream(dev).wait_stream(s)
        put(s)


def fork(n, dev):
    """n streams that all start behind the current one."""
    cur, out = torch.cuda.current_stream(dev), []
    for _ in range(n):
        s = grab(dev)  # leak: the streams grabbed so far are lost when a later grab raises OutOfStreams
        s.wait_stream(cur)
        out.append(s)
    return out


def join(ss, dev):
    cur = torch.cuda.current_stream(dev)
    for s in ss:
        cur.wait_stream(s)
        put(s)


def branches(fns, x):
    """Independent branches side by side, one after the other if streams are short."""
    dev = x.device.index
    try:
        ss = fork(len(fns), dev)  # clean: joined in the finally
    except OutOfStreams:
        return [f(x) for f in fns]
    outs = []
    try:
        for f, s in zip(fns, ss):
            with torch.cuda.stream(s):
                outs.append(f(x))
    finally:
        join(ss, dev)
    return outs


# --- named fences between producers and consumers ---------------------------

def set_fence(name, stream):
    ev = event()  # leak: the event already under this name is overwritten and not retired
    ev.record(stream)
    _fences[name] = ev


def wait_fence(name, stream):
    ev = _fences.pop(name, None)
    if ev is None:
        return False
    stream.wait_event(ev)
    retire(ev)
    return True


def clear_fences():
    while _fences:
        _, ev = _fences.popitem()
        ev.synchronize()
        retire(ev)


# --- timing ------------------------------------------------------------------

def timed(fn, *args):
    t0 = event(timing=True)  # clean: near miss, waits in _times and is retired by drain_times
    t1 = event(timing=True)  # clean: the same
    t0.record()
    out = fn(*args)
    t1.record()
    _times.append((fn.__qualname__, t0, t1))
    return out


def drain_times():
    keep = []
    for name, t0, t1 in _times:
        if not t1.query():
            keep.append((name, t0, t1))
            continue
        n, ms = _totals.get(name, (0, 0.0))
        _totals[name] = (n + 1, ms + t0.elapsed_time(t1))
        retire(t0)
        retire(t1)
    _times[:] = keep
    return dict(_totals)


# --- copies ------------------------------------------------------------------

def _watcher():
    while True:
        item = _watch.get()
        if item is None:
            return
        ev, s, done = item
        ev.synchronize()
        retire(ev)
        put(s)
        done()


def start_watcher():
    t = threading.Thread(target=_watcher, name="copy-watch", daemon=True)
    t.start()
    return t


def copy_async(dst, src, done=None):
    """Copy on a high-priority stream; done() runs on the watcher thread."""
    dev = dst.device.index
    s = grab(dev, prio=-1)  # leak: without done nobody watches the copy and the stream is not put back
    s.wait_stream(torch.cuda.current_stream(dev))
    with torch.cuda.stream(s):
        dst.copy_(src, non_blocking=True)
    if done is None:
        torch.cuda.current_stream(dev).wait_stream(s)
        return
    ev = event()  # clean: near miss, the watcher retires it
    ev.record(s)
    _watch.put((ev, s, done))


def prefetch(layers, dev):
    """Yields layers with their weights on the device, the next one on its way."""
    s = grab(dev)  # clean: the generator's finally puts it back
    try:
        nxt = None
        for i, layer in enumerate(layers):
            if nxt is not None:
                torch.cuda.current_stream(dev).wait_stream(s)
            if i + 1 < len(layers):
                with torch.cuda.stream(s):
                    nxt = layers[i + 1].to(dev, non_blocking=True)
            yield layer
    finally:
        put(s)


def reduce_grads(grads, group, stream=None):
    own = stream is None
    dev = grads[0].device.index
    if own:
        stream = grab(dev)  # clean: near miss, put below under the same flag
    stream.wait_stream(torch.cuda.current_stream(dev))
    with torch.cuda.stream(stream):
        for g in grads:
            torch.distributed.all_reduce(g, group=group)
    torch.cuda.current_stream(dev).wait_stream(stream)
    if own:
        put(stream)


def warm(fn, dev, tries=3):
    """Run fn once on a side stream as graph capture wants it."""
    for k in range(tries):
        s = grab(dev)  # leak: out of memory goes round again without putting it back
        try:
            with torch.cuda.stream(s):
                fn()
        except torch.cuda.OutOfMemoryError:
            log.warning("warm-up %d ran out of memory", k)
            torch.cuda.empty_cache()
            continue
        s.synchronize()
        put(s)
        return True
    return False


def mean_gap(fn, dev, n=10):
    """Mean milliseconds between two launches of fn."""
    marks = []
    with side(dev):  # clean: the context manager puts the stream back
        for _ in range(n + 1):
            ev = event(timing=True)  # leak: the marks are retired only if all have come by
            ev.record()
            marks.append(ev)
            fn()
    if not marks[-1].query():
        log.info("%s still running, no gap", fn)
        return None
    ms = marks[0].elapsed_time(marks[-1]) / n
    for ev in marks:
        retire(ev)
    return ms
