"""Iteration over sensor frames with a class-based iterator."""


class FrameRing:
    def __init__(self, frames):
        self._blank = list(frames)

    def next_blank(self):
        return self._blank.pop()

    def wipe(self, frame):
        frame[:] = bytes(len(frame))
        self._blank.append(frame)


class FrameReader:
    """Yields one frame at a time; the frame before is wiped on the next step."""

    def __init__(self, ring, sensor, count):
        self.ring = ring
        self.sensor = sensor
        self.left = count
        self.frame = None

    def __iter__(self):
        return self

    def __next__(self):
        self.close()
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.frame = self.ring.next_blank()  # clean: wiped by the next step or by close
        self.sensor.read(self.frame)
        return self.frame

    def close(self):
        if self.frame is not None:
            self.ring.wipe(self.frame)
            self.frame = None


def average(ring, sensor, count):
    total = 0
    for frame in FrameReader(ring, sensor, count):  # clean: runs until the iterator stops
        total += sum(frame)
    return total / max(count, 1)


def first_bright(ring, sensor, count, level):
    for index, frame in enumerate(FrameReader(ring, sensor, count)):  # leak: returns with one frame unwiped
        if max(frame) >= level:
            return index
    return -1


def first_dark(ring, sensor, count, level):
    reader = FrameReader(ring, sensor, count)  # clean: closed after the break
    found = -1
    for index, frame in enumerate(reader):
        if max(frame) < level:
            found = index
            break
    reader.close()
    return found


def difference(ring, sensor):
    base = ring.next_blank()  # clean: wiped at the end
    sensor.read(base)
    shot = next(FrameReader(ring, sensor, 1))  # leak: the reader is gone, nobody wipes its frame
    delta = sum(abs(a - b) for a, b in zip(base, shot))
    ring.wipe(base)
    return delta


def sample(ring, sensor):
    frame = ring.next_blank()  # clean: wiped after the copy
    sensor.read(frame)
    copy = bytes(frame)
    ring.wipe(frame)
    return copy
