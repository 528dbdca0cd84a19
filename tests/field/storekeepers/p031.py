from collections import deque
from contextlib import contextmanager


class Frame:
    def __init__(self, rows, cols):
        self.shape = (rows, cols)
        self.stamp = 0


class FrameBank:
    def __init__(self, count, rows, cols):
        self.bank = [Frame(rows, cols) for _ in range(count)]

    def grab(self):
        return self.bank.pop()

    def drop(self, frame):
        self.bank.append(frame)

    @contextmanager
    def borrowed(self):
        frame = self.grab()  # clean: dropped in finally
        try:
            yield frame
        finally:
            self.drop(frame)


class Camera:
    """Last frames stay in a bounded deque for the motion detector."""

    def __init__(self, bank, history):
        self.bank = bank
        self.history = deque(maxlen=history)
        self.frozen = None
        self.clock = 0

    def capture(self, fill):
        frame = self.bank.grab()  # leak: the bounded deque pushes out the oldest without drop
        self.clock += 1
        frame.stamp = self.clock
        fill(frame)
        self.history.append(frame)
        return frame.stamp

    def freeze(self, fill):
        if self.frozen is not None:
            self.bank.drop(self.frozen)
        self.frozen = self.bank.grab()  # clean: the old one dropped first, close drops the last
        fill(self.frozen)

    def snapshot(self, fill):
        with self.bank.borrowed() as frame:  # clean: context manager drops it
            fill(frame)
            return frame.stamp, frame.shape

    def close(self):
        while self.history:
            self.bank.drop(self.history.pop())
        if self.frozen is not None:
            self.bank.drop(self.frozen)
            self.frozen = None


class Recorder:
    def __init__(self, bank):
        self.bank = bank
        self.clip = deque()

    def record(self, fill):
        frame = self.bank.grab()  # leak: cut removes frames of the clip's head without drop
        fill(frame)
        self.clip.append(frame)

    def cut(self, stamp):
        removed = 0
        while self.clip and self.clip[0].stamp < stamp:
            self.clip.popleft()
            removed += 1
        return removed

    def save(self, write):
        for frame in self.clip:
            write(frame)
            self.bank.drop(frame)
        self.clip.clear()
