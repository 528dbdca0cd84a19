class TimerCell:
    __slots__ = ("callback", "due")

    def __init__(self):
        self.callback = None
        self.due = 0


class CellPool:
    def __init__(self, n):
        self.cells = [TimerCell() for _ in range(n)]

    def obtain_cell(self, callback, due):
        cell = self.cells.pop()
        cell.callback, cell.due = callback, due
        return cell

    def dispose_cell(self, cell):
        cell.callback = None
        self.cells.append(cell)


class TimerWheel:
    """Buckets of cells; the far list holds what is beyond one turn."""

    def __init__(self, cells, size):
        self.cells = cells
        self.size = size
        self.now = 0
        self.buckets = [[] for _ in range(size)]
        self.far = []
        self.idle_cell = None

    def after(self, ticks, callback):
        if ticks < self.size:
            cell = self.cells.obtain_cell(callback, self.now + ticks)  # clean: tick disposes it
            self.buckets[(self.now + ticks) % self.size].append(cell)
        else:
            cell = self.cells.obtain_cell(callback, self.now + ticks)  # leak: tick forgets due far cells
            self.far.append(cell)

    def tick(self):
        at = self.now % self.size
        bucket, self.buckets[at] = self.buckets[at], []
        for cell in bucket:
            cell.callback()
            self.cells.dispose_cell(cell)
        for cell in [c for c in self.far if c.due <= self.now]:
            cell.callback()
            self.far.remove(cell)
        self.now += 1

    def on_idle(self, callback):
        if self.idle_cell is not None:
            self.idle_cell.callback = callback
            return
        self.idle_cell = self.cells.obtain_cell(callback, -1)  # clean: clear disposes it

    def run_idle(self):
        if self.idle_cell is not None:
            self.idle_cell.callback()

    def clear(self):
        for bucket in self.buckets:
            while bucket:
                self.cells.dispose_cell(bucket.pop())
        while self.far:
            self.cells.dispose_cell(self.far.pop())
        if self.idle_cell is not None:
            self.cells.dispose_cell(self.idle_cell)
            self.idle_cell = None


class Alarm:
    def __init__(self, cells):
        self.cells = cells
        self.cell = None

    def arm(self, due, callback):
        self.cell = self.cells.obtain_cell(callback, due)  # leak: snooze arms anew over the cell it holds

    def snooze(self, ticks):
        if self.cell is not None:
            self.arm(self.cell.due + ticks, self.cell.callback)

    def disarm(self):
        if self.cell is not None:
            self.cells.dispose_cell(self.cell)
            self.cell = None
