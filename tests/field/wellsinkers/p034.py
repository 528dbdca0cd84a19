"""CUDA events that return to the pool once the device has passed them."""
import torch


class EventBin:
    def __init__(self):
        self._ready = []
        self._cooling = []

    def _harvest(self):
        still = []
        for event in self._cooling:
            (self._ready if event.query() else still).append(event)
        self._cooling = still

    def fish(self):
        if not self._ready:
            self._harvest()
        if self._ready:
            return self._ready.pop()
        return torch.cuda.Event(enable_timing=True)

    def toss(self, event):
        self._cooling.append(event)


class LayerTimer:
    def __init__(self, bin_):
        self.bin = bin_
        self.open = {}
        self.total = {}

    def begin(self, name):
        event = self.bin.fish()  # clean: kept in open, tossed by finish
        event.record()
        self.open[name] = event

    def finish(self, name):
        start = self.open.pop(name)
        stop = self.bin.fish()  # leak: the stop event is never tossed
        stop.record()
        stop.synchronize()
        self.total[name] = self.total.get(name, 0.0) + start.elapsed_time(stop)
        self.bin.toss(start)


def fence(bin_, producer, consumer):
    event = bin_.fish()  # clean: tossed after the wait is queued
    event.record(producer)
    consumer.wait_event(event)
    bin_.toss(event)


def is_idle(bin_, stream):
    event = bin_.fish()  # leak: an idle stream returns with the event
    event.record(stream)
    if event.query():
        return True
    bin_.toss(event)
    return False


def barrier(bin_, streams):
    event = bin_.fish()  # clean: tossed in finally
    try:
        event.record()
        for stream in streams:
            stream.wait_event(event)
    finally:
        bin_.toss(event)
