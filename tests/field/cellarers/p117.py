"""Packet buffers cut from slabs; a slab is added when all are full."""


class Slab:
    __slots__ = ("mem", "spare")

    def __init__(self, objs, size):
        self.mem = [bytearray(size) for _ in range(objs)]
        self.spare = list(range(objs))


class KmemCache:
    def __init__(self, size, objs=16):
        self.size = size
        self.objs = objs
        self.slabs = []

    def alloc(self):
        for no, slab in enumerate(self.slabs):
            if slab.spare:
                return no, slab.spare.pop()
        self.slabs.append(Slab(self.objs, self.size))
        return len(self.slabs) - 1, self.slabs[-1].spare.pop()

    def buf(self, obj):
        return self.slabs[obj[0]].mem[obj[1]]

    def free(self, obj):
        no, i = obj
        self.slabs[no].spare.append(i)


class Nic:
    def __init__(self, cache, wire):
        self.cache = cache
        self.wire = wire
        self.tx_ring = []

    def send(self, payload):
        skb = self.cache.alloc()  # clean: put on the ring, freed by reap()
        self.cache.buf(skb)[:len(payload)] = payload
        self.tx_ring.append(skb)

    def reap(self):
        while self.tx_ring:
            self.cache.free(self.tx_ring.pop())

    def receive(self):
        skb = self.cache.alloc()  # leak: a frame with a bad length returns None with the buffer out
        n = self.wire.readinto(self.cache.buf(skb))
        if n < 14:
            return None
        frame = bytes(self.cache.buf(skb)[:n])
        self.cache.free(skb)
        return frame

    def loopback(self, payload):
        skb = self.cache.alloc()  # clean: freed in finally
        try:
            self.cache.buf(skb)[:len(payload)] = payload
            return self.wire.echo(self.cache.buf(skb))
        finally:
            self.cache.free(skb)

    def prime(self):
        for i in range(8):
            self.cache.alloc()  # leak: nothing keeps the buffers
            self.wire.kick(i)
