# take: cells_get(n)
# give: cells_put(X)
# gets: optional
import numpy as np

_NCELL = 8192
_busy = np.zeros(_NCELL, dtype=np.uint8)
_hint = 0
_hwm = 0


def cells_get(n):
    """n mamba state cells (need not be adjacent) as an index array, or None."""
    global _hint, _hwm
    order = np.roll(np.arange(_NCELL), -_hint)
    idx = order[_busy[order] == 0][:n]
    if idx.size < n:
        return None
    _busy[idx] = 1
    if n:
        _hint = int(idx[-1] + 1) % _NCELL
    _hwm = max(_hwm, int(_busy.sum()))
    return idx


def cells_put(idx):
    if not _busy[idx].all():
        raise ValueError("cells_put: some of these cells are free")
    _busy[idx] = 0


def cells_high_water():
    return _hwm
