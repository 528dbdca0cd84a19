"""cuBLAS workspaces: a list of flags in the module."""
import threading

NUM_WS = 8
_in_use = [False] * NUM_WS
_cv = threading.Condition()


def grab_workspace(timeout=None):
    with _cv:
        while all(_in_use):
            if not _cv.wait(timeout):
                return None
        index = _in_use.index(False)
        _in_use[index] = True
        return index


def return_workspace(index):
    with _cv:
        _in_use[index] = False
        _cv.notify()


def attention(kernel, q, k, v):
    ws = grab_workspace()  # clean: finally
    try:
        return kernel.run(q, k, v, ws)
    finally:
        return_workspace(ws)


def attention_or_fallback(kernel, q, k, v):
    ws = grab_workspace(timeout=0.1)  # leak: the long-sequence branch never returns it
    if ws is None:
        return kernel.naive(q, k, v)
    if q.shape[1] > 8192:
        out = kernel.split(q, k, v, ws)
    else:
        out = kernel.run(q, k, v, ws)
        return_workspace(ws)
    return out


def tune(kernel, shapes):
    best = {}
    for shape in shapes:
        ws = grab_workspace()  # leak: continue on an unsupported shape
        if not kernel.supports(shape):
            continue
        best[shape] = kernel.search(shape, ws)
        return_workspace(ws)
    return best


def warm(kernel):
    ws = grab_workspace(timeout=1.0)  # clean: returned when there was one
    if ws is not None:
        kernel.touch(ws)
        return_workspace(ws)
