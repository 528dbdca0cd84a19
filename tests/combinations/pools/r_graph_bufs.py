# take: graph_input_for(n)
# give: graph_input_done(X)
# gets: value
"""Static input buffers for captured decode graphs, cached by padded batch size."""
import numpy as np

_CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_spare: dict = {}
_made: dict = {}


def _padded(bs):
    for size in _CAPTURE_SIZES:
        if bs <= size:
            return size
    raise ValueError(f"batch {bs} has no captured graph")


def graph_input_for(bs):
    size = _padded(bs)
    shelf = _spare.setdefault(size, [])
    if shelf:
        return shelf.pop()
    _made[size] = _made.get(size, 0) + 1
    return np.empty((size, 4), dtype=np.int64)


def graph_input_done(buf):
    buf.fill(0)
    _spare[buf.shape[0]].append(buf)


def graph_inputs_made():
    return sum(_made.values())
