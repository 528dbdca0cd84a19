"""Workspace views on one large device tensor."""
from contextlib import contextmanager


class Workspace:
    def __init__(self, base, rows):
        self.base = base
        self._rows = list(range(rows))
        self._by_view = {}

    def carve(self):
        row = self._rows.pop()
        view = self.base[row]
        self._by_view[id(view)] = (row, view)
        return view

    def restore(self, view):
        row, _ = self._by_view.pop(id(view))
        self._rows.append(row)

    @property
    def spare(self):
        return len(self._rows)


@contextmanager
def scratch(space, fill=None):
    view = space.carve()  # clean: restored in finally
    try:
        if fill is not None:
            view[:] = fill
        yield view
    finally:
        space.restore(view)


def views(space, count):
    for _ in range(count):
        view = space.carve()  # clean: restored when the consumer asks for the next one
        yield view
        space.restore(view)


def softmax_rows(space, kernel, rows):
    out = []
    for row in rows:
        with scratch(space, fill=row) as view:  # clean: the context manager restores
            if kernel.is_constant(view):
                out.append([1.0 / len(row)] * len(row))
                continue
            kernel.softmax_(view)
            out.append(view.tolist())
    return out


def calibrate(space, kernel, trials):
    total = 0.0
    for view in views(space, trials):  # clean: runs to the end
        kernel.fill_random_(view)
        total += kernel.max_abs(view)
    return total / trials


def find_fast_view(space, kernel, budget_us):
    for index, view in enumerate(views(space, space.spare)):  # leak: break leaves the generator at its yield
        kernel.fill_random_(view)
        if kernel.time_us(view) < budget_us:
            chosen = index
            break
    else:
        chosen = -1
    return chosen


def compare(space, kernel, left, right):
    a = space.carve()  # leak: returns early when the norms differ
    a[:] = left
    norm = kernel.norm(a)
    if abs(norm - kernel.norm_of(right)) > 1e-3:
        return False
    same = kernel.allclose(a, right)
    space.restore(a)
    return same
