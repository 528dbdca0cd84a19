"""Recycled CUDA events: plain functions over the state of the module."""
import torch

_spare = []
_live = 0
MAX_EVENTS = 512


def obtain_event(timing=False):
    global _live
    if _live >= MAX_EVENTS:
        raise RuntimeError("too many events in flight")
    _live += 1
    if _spare and not timing:
        return _spare.pop()
    return torch.cuda.Event(enable_timing=timing)


def recycle_event(event):
    global _live
    _live -= 1
    if len(_spare) < 64:
        _spare.append(event)


def timed(fn, stream):
    first = obtain_event(timing=True)  # clean: recycled below
    last = obtain_event(timing=True)  # clean: recycled below
    first.record(stream)
    fn()
    last.record(stream)
    last.synchronize()
    ms = first.elapsed_time(last)
    recycle_event(first)
    recycle_event(last)
    return ms


def fence(src, dst):
    event = obtain_event()  # leak: the same-stream way returns without recycling
    if src is dst:
        return
    event.record(src)
    dst.wait_event(event)
    recycle_event(event)


def join(streams, main):
    for s in streams:
        ev = obtain_event()  # leak: never recycled
        ev.record(s)
        main.wait_event(ev)


class Fence:
    def __init__(self, stream):
        self.event = obtain_event()  # clean: stored, close() recycles it
        self.event.record(stream)

    def wait(self):
        self.event.synchronize()

    def close(self):
        if self.event is not None:
            recycle_event(self.event)
            self.event = None
