class ByteRing:
    def __init__(self, size):
        self.buf = bytearray(size)
        self.size = size
        self.head = 0
        self.tail = 0
        self.pending = {}

    def reserve(self, n):
        if self.head + n - self.tail > self.size:
            return -1
        at = self.head
        self.head += n
        self.pending[at] = [n, False]
        return at

    def store(self, at, data):
        for i, b in enumerate(data):
            self.buf[(at + i) % self.size] = b

    def submit(self, at):
        self.pending[at][1] = True

    def cancel(self, at):
        self.pending[at][1] = True
        self.buf[at % self.size] = 0

    def flush(self):
        while self.tail in self.pending and self.pending[self.tail][1]:
            self.tail += self.pending.pop(self.tail)[0]


def log_line(ring, text):
    data = text.encode()
    at = ring.reserve(len(data))  # clean: submitted wherever space was given
    if at < 0:
        return False
    ring.store(at, data)
    ring.submit(at)
    return True


def log_record(ring, record, mask):
    at = ring.reserve(record.size)  # leak: a masked record returns without submit or cancel
    if at < 0:
        return False
    if not record.flags & mask:
        return False
    ring.store(at, record.pack())
    ring.submit(at)
    return True


def log_checked(ring, record):
    at = ring.reserve(record.size)  # clean: cancelled or submitted
    data = record.pack()
    if at >= 0 and len(data) != record.size:
        ring.cancel(at)
    elif at >= 0:
        ring.store(at, data)
        ring.submit(at)


def pad_to(ring, boundary):
    gap = -ring.head % boundary
    if gap:
        ring.reserve(gap)  # leak: the padding is neither submitted nor cancelled
    return gap
