"""Sharded pool of compression contexts."""
import threading
import zlib


class Shard:
    __slots__ = ("lock", "items")

    def __init__(self):
        self.lock = threading.Lock()
        self.items = []


class Compressors:
    def __init__(self, shards=8, level=6):
        self._shards = [Shard() for _ in range(shards)]
        self._level = level
        self._out = {}

    def _pick(self):
        return self._shards[threading.get_ident() % len(self._shards)]

    def rent(self):
        shard = self._pick()
        with shard.lock:
            ctx = shard.items.pop() if shard.items else [self._level, bytearray(1 << 16)]
        self._out[id(ctx)] = shard
        return ctx

    def unrent(self, ctx):
        shard = self._out.pop(id(ctx))
        with shard.lock:
            shard.items.append(ctx)


def pack(comps, blob):
    ctx = comps.rent()  # leak: tiny blobs return with the context
    if len(blob) < 64:
        return b"\x00" + blob
    body = zlib.compress(blob, ctx[0])
    comps.unrent(ctx)
    return b"\x01" + body


def pack_all(comps, blobs):
    ctx = comps.rent()  # clean: one context for all, unrented at the end
    out = [zlib.compress(b, ctx[0]) for b in blobs]
    comps.unrent(ctx)
    return out


class Archive:
    def __init__(self, comps):
        self.comps = comps
        self.ctx = comps.rent()  # clean: held by the object, unrented by finish

    def add(self, blob):
        return zlib.compress(blob, self.ctx[0])

    def finish(self):
        self.comps.unrent(self.ctx)

    def ratio(self, blob):
        ctx = self.comps.rent()  # leak: unrented only when it got smaller
        size = len(zlib.compress(blob, ctx[0]))
        if size < len(blob):
            self.comps.unrent(ctx)
        return size / max(len(blob), 1)
