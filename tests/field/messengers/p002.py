"""Staging buffers for a ring all-reduce."""


class StagingBuffer:
    def __init__(self, nbytes):
        self.data = bytearray(nbytes)
        self.offset = 0


class StagingArena:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._idle = [StagingBuffer(nbytes) for _ in range(count)]
        self._busy = set()

    def check_out(self):
        buf = self._idle.pop()
        self._busy.add(id(buf))
        return buf

    def check_in(self, buf):
        self._busy.discard(id(buf))
        buf.offset = 0
        self._idle.append(buf)


class Ring:
    def __init__(self, arena, rank, world, link):
        self.arena = arena
        self.rank = rank
        self.world = world
        self.link = link
        self.sent = 0

    def _buffer(self):
        return self.arena.check_out()  # clean: handed to the caller

    def packed(self, payload):
        buf = self._buffer()  # clean: handed on, filled
        size = min(len(payload), self.arena.nbytes)
        buf.data[:size] = payload[:size]
        buf.offset = size
        return buf

    def send_right(self, payload):
        buf = self.packed(payload)  # clean: checked in after the send
        self.link.send((self.rank + 1) % self.world, memoryview(buf.data)[:buf.offset])
        self.sent += buf.offset
        self.arena.check_in(buf)

    def measure(self, payload):
        size = self.packed(payload).offset  # leak: only the offset is kept
        return size / self.arena.nbytes

    def broadcast(self, payload, peers):
        buf = self.packed(payload)  # leak: no peers, returns 0 with the buffer out
        peers = [p for p in peers if p != self.rank]
        if not peers:
            return 0
        for peer in peers:
            self.link.send(peer, bytes(buf.data[:buf.offset]))
        self.arena.check_in(buf)
        return len(peers)

    def barrier(self):
        buf = self._buffer()  # clean: checked in on both ways
        buf.data[0] = self.rank
        buf.offset = 1
        if self.world == 1:
            self.arena.check_in(buf)
            return True
        self.link.send(0, bytes(buf.data[:1]))
        self.arena.check_in(buf)
        return False
