"""Ring of log entries: a producer reserves a place, then publishes or abandons it."""
EMPTY, RESERVED, READY, SKIP = range(4)


class LogRing:
    def __init__(self, size):
        self.size = size
        self.state = bytearray(size)
        self.data = [None] * size
        self.head = 0
        self.tail = 0

    def reserve(self):
        if self.head - self.tail == self.size:
            return None
        seq = self.head
        self.head += 1
        self.state[seq % self.size] = RESERVED
        return seq

    def publish(self, seq, record):
        self.data[seq % self.size] = record
        self.state[seq % self.size] = READY

    def abandon(self, seq):
        self.state[seq % self.size] = SKIP

    def drain(self):
        while self.tail < self.head and self.state[self.tail % self.size] in (READY, SKIP):
            cell = self.tail % self.size
            if self.state[cell] == READY:
                yield self.data[cell]
            self.state[cell] = EMPTY
            self.tail += 1


class Producer:
    def __init__(self, ring, clock):
        self.ring = ring
        self.clock = clock

    def encoded(self, obj, encode):
        seq = self.ring.reserve()  # clean: published or abandoned
        if seq is None:
            return False
        blob = encode(obj)
        if blob is None:
            self.ring.abandon(seq)
            return False
        self.ring.publish(seq, blob)
        return True

    def sampled(self, text, rate, rng):
        seq = self.ring.reserve()  # leak: place left reserved when the sample is skipped
        if seq is None:
            return
        if rng.random() < rate:
            self.ring.publish(seq, ("sampled", self.clock(), text))


def copy_lines(ring, lines):
    for n, line in enumerate(lines):
        seq = ring.reserve()  # leak: blank lines leave the place reserved
        if seq is None:
            return n
        if not line.strip():
            continue
        ring.publish(seq, line)
    return len(lines)
