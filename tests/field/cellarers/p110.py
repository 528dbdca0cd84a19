"""Sequenced ring: a producer claims a cell, fills it, then publishes or skips it."""
EMPTY, CLAIMED, READY, SKIPPED = range(4)


class EventRing:
    def __init__(self, size=1024):
        self.mask = size - 1
        self.cells = [None] * size
        self.state = bytearray(size)
        self.head = 0
        self.tail = 0

    def next_cell(self):
        if self.head - self.tail > self.mask:
            return None
        seq = self.head
        self.head += 1
        self.state[seq & self.mask] = CLAIMED
        return seq

    def publish(self, seq, event):
        self.cells[seq & self.mask] = event
        self.state[seq & self.mask] = READY

    def skip(self, seq):
        self.state[seq & self.mask] = SKIPPED

    def drain(self):
        while self.tail < self.head and self.state[self.tail & self.mask] in (READY, SKIPPED):
            i = self.tail & self.mask
            if self.state[i] == READY:
                yield self.cells[i]
            self.state[i] = EMPTY
            self.tail += 1


class Gateway:
    def __init__(self, ring):
        self.ring = ring
        self.dropped = 0

    def on_packet(self, packet):
        seq = self.ring.next_cell()  # leak: a malformed packet leaves its cell claimed
        if seq is None:
            self.dropped += 1
            return
        if len(packet) < 8:
            self.dropped += 1
            return
        self.ring.publish(seq, packet)

    def on_tick(self, now):
        seq = self.ring.next_cell()  # clean: published wherever a cell was given
        if seq is not None:
            self.ring.publish(seq, ("tick", now))

    def on_order(self, order, book):
        seq = self.ring.next_cell()  # clean: published or skipped
        if seq is None:
            return False
        if order.symbol not in book:
            self.ring.skip(seq)
            return False
        self.ring.publish(seq, order)
        return True

    def reserve_gap(self):
        self.ring.next_cell()  # leak: the sequence number is dropped
        self.dropped += 1
