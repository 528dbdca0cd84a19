"""Per-thread arenas reached through a module-level function."""
import threading


class Arena:
    def __init__(self):
        self.stack = []
        self.made = 0

    def allot(self, size):
        if self.stack and len(self.stack[-1]) >= size:
            return self.stack.pop()
        self.made += 1
        return bytearray(size)

    def reclaim(self, block):
        self.stack.append(block)


_local = threading.local()


def current():
    arena = getattr(_local, "arena", None)
    if arena is None:
        arena = _local.arena = Arena()
    return arena


def encode(text):
    block = current().allot(len(text) * 4)  # clean: near miss, the pool is reached through a call both times
    raw = text.encode()
    block[: len(raw)] = raw
    result = bytes(block[: len(raw)])
    current().reclaim(block)
    return result


def encode_limited(text, limit):
    block = current().allot(limit)  # leak: text over the limit returns an empty result
    raw = text.encode()
    if len(raw) > limit:
        return b""
    block[: len(raw)] = raw
    result = bytes(block[: len(raw)])
    current().reclaim(block)
    return result


def encode_all(texts):
    arena = current()
    blocks = {}
    try:
        for text in texts:
            if text not in blocks:
                blocks[text] = arena.allot(len(text) * 4)  # clean: near miss, the dict is emptied in finally
            raw = text.encode()
            blocks[text][: len(raw)] = raw
        return {t: bytes(b) for t, b in blocks.items()}
    finally:
        for block in blocks.values():
            arena.reclaim(block)


def concat(parts):
    arena = current()
    block = arena.allot(0)  # leak: replaced in the loop by a bigger one without being reclaimed
    used = 0
    for part in parts:
        if used + len(part) > len(block):
            bigger = arena.allot(2 * (used + len(part)))  # leak: replaced in turn by the next bigger one
            bigger[:used] = block[:used]
            block = bigger
        block[used : used + len(part)] = part
        used += len(part)
    out = bytes(block[:used])
    arena.reclaim(block)
    return out


def concat_grown(parts):
    arena = current()
    block = arena.allot(16)  # clean: near miss, reclaimed when a bigger one takes over, or at the end
    used = 0
    for part in parts:
        if used + len(part) > len(block):
            small, block = block, arena.allot(2 * (used + len(part)))  # clean: near miss, becomes the current block, reclaimed at the end
            block[:used] = small[:used]
            arena.reclaim(small)
        block[used : used + len(part)] = part
        used += len(part)
    out = bytes(block[:used])
    arena.reclaim(block)
    return out
