# take: obtain_event()
# give: recycle_event(X)
# gets: value
"""Reusable CUDA events: cudaEventCreate is not free when called per layer."""
import threading

import torch

_spare_events = []
_spare_lock = threading.Lock()


def obtain_event():
    with _spare_lock:
        if _spare_events:
            return _spare_events.pop()
    return torch.cuda.Event(enable_timing=True)


def recycle_event(ev):
    with _spare_lock:
        _spare_events.append(ev)


def spare_event_count():
    return len(_spare_events)
