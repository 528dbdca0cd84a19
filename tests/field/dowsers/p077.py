"""A scoped class as the only face of a workspace pool kept in a module list."""

_workspaces = [bytearray(1 << 16) for _ in range(4)]


class ScopedWorkspace:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self._buf = None

    def open(self):
        self._buf = _workspaces.pop() if _workspaces else bytearray(1 << 16)
        return memoryview(self._buf)[:self.nbytes]

    def close(self):
        if self._buf is not None:
            _workspaces.append(self._buf)
            self._buf = None

    def __enter__(self):
        return self.open()

    def __exit__(self, *exc):
        self.close()
        return False


def reduce_rows(kernel, x):
    with ScopedWorkspace(x.rows * 4) as ws:  # clean: with
        return kernel.reduce(x, ws)


def scan_rows(kernel, x):
    scoped = ScopedWorkspace(x.rows * 4)
    ws = scoped.open()  # leak: a single row returns before close
    if x.rows == 1:
        return kernel.copy(x)
    out = kernel.scan(x, ws)
    scoped.close()
    return out


def histogram(kernel, xs):
    out = []
    for x in xs:
        scoped = ScopedWorkspace(1024)
        ws = scoped.open()  # leak: a constant input continues with the workspace open
        if x.constant:
            continue
        out.append(kernel.histogram(x, ws))
        scoped.close()
    return out


def cumulative(kernel, x):
    scoped = ScopedWorkspace(x.rows * 8)
    ws = scoped.open()  # clean: closed in finally
    try:
        return kernel.cumsum(x, ws)
    finally:
        scoped.close()


def chained(kernel, x):
    with ScopedWorkspace(256) as a, ScopedWorkspace(512) as b:  # clean: with
        return kernel.chain(x, a, b)
