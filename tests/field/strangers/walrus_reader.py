"""Reading frames from a receive ring; frames must be returned to the ring."""
from collections import deque


class Frame:
    __slots__ = ("data", "bad", "last")

    def __init__(self):
        self.data = b""
        self.bad = False
        self.last = False


class FrameRing:
    def __init__(self, n):
        self._ready = deque()
        self._empty = deque(Frame() for _ in range(n))

    def next_frame(self):
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def return_frame(self, frame):
        frame.data = b""
        self._empty.append(frame)


def read_all(ring):
    out = []
    while (frame := ring.next_frame()) is not None:  # clean: near miss, walrus loop that returns every frame
        if not frame.bad:
            out.append(bytes(frame.data))
        ring.return_frame(frame)
    return out


def read_good(ring):
    out = []
    while (frame := ring.next_frame()) is not None:  # leak: bad frames are skipped and not returned
        if frame.bad:
            continue
        out.append(bytes(frame.data))
        ring.return_frame(frame)
    return out


def read_message(ring):
    parts = []
    while True:
        frame = ring.next_frame()  # clean: near miss, every frame is returned before break or loop
        if frame is None:
            break
        last = frame.last
        parts.append(bytes(frame.data))
        ring.return_frame(frame)
        if last:
            break
    return b"".join(parts)


def peek_type(ring):
    if (frame := ring.next_frame()) is None:  # leak: unknown types fall out of the match
        return "idle"
    match frame.data[:1]:
        case b"K":
            ring.return_frame(frame)
            return "key"
        case b"V":
            ring.return_frame(frame)
            return "value"
    return "unknown"


def classify(ring):
    frame = ring.next_frame()  # clean: near miss, each case returns it, the wildcard too
    if frame is None:
        return "idle"
    match (frame.bad, frame.last):
        case (True, _):
            ring.return_frame(frame)
            kind = "bad"
        case (False, True):
            kind = "last"
            ring.return_frame(frame)
        case _:
            ring.return_frame(frame)
            kind = "body"
    return kind


def latest(ring):
    newest = None
    while True:
        frame = ring.next_frame()  # leak: older frames are overwritten by newer ones
        if frame is None:
            break
        newest = frame
    if newest is None:
        return b""
    data = bytes(newest.data)
    ring.return_frame(newest)
    return data
