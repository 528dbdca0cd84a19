"""Optional exclusive access to a plotter."""
from contextlib import contextmanager, nullcontext


class PenHolder:
    def __init__(self, pens):
        self._rack = list(pens)

    def grab_pen(self):
        return self._rack.pop()

    def rack_pen(self, pen):
        self._rack.append(pen)


class Plotter:
    def __init__(self, holder, motor):
        self.holder = holder
        self.motor = motor
        self.strokes = 0

    @contextmanager
    def pen(self, width):
        tool = self.holder.grab_pen()  # clean: racked after the block
        try:
            tool.width = width
            yield tool
        finally:
            self.holder.rack_pen(tool)

    @contextmanager
    def pen_down(self):
        tool = self.holder.grab_pen()  # leak: a pen that is still wet is not racked after the block
        self.motor.lower()
        try:
            yield tool
        finally:
            self.motor.lift()
            if not tool.wet:
                self.holder.rack_pen(tool)

    def line(self, points, pen=None):
        with nullcontext(pen) if pen is not None else self.pen(0.3) as tool:  # clean: its own pen is racked
            for x, y in points:
                self.motor.move(x, y, tool.width)
                self.strokes += 1

    def frame(self, width, height):
        with self.pen(0.7) as tool:  # clean: racked, the line only borrows it
            self.line([(0, 0), (width, 0), (width, height), (0, height), (0, 0)], tool)

    def caption(self, text):
        tool = self.holder.grab_pen()  # leak: nullcontext gives nothing back
        with nullcontext(tool) as pen:
            for i, _ in enumerate(text):
                self.motor.move(i, 0, pen.width)
        return len(text)

    def dots(self, points):
        tool = self.holder.grab_pen()  # clean: racked in finally
        try:
            self.line(points, tool)
        finally:
            self.holder.rack_pen(tool)
