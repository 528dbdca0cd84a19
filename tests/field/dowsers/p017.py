"""Scratch arena as a closure: returns the pair of functions."""


def make_scratch(total, align=256):
    holes = [(0, total)]
    sizes = {}

    def alloc(nbytes):
        nbytes = -(-nbytes // align) * align
        for i, (start, length) in enumerate(holes):
            if length >= nbytes:
                holes[i] = (start + nbytes, length - nbytes)
                sizes[start] = nbytes
                return start
        raise MemoryError(nbytes)

    def release(start):
        holes.append((start, sizes.pop(start)))
        holes.sort()

    return alloc, release


scratch_alloc, scratch_release = make_scratch(64 << 20)


def softmax(dev, x):
    tmp = scratch_alloc(x.nbytes)  # clean: released in finally
    try:
        return dev.softmax(x, tmp)
    finally:
        scratch_release(tmp)


def topk(dev, x, k):
    tmp = scratch_alloc(x.nbytes)  # leak: k == 1 returns before the release
    if k == 1:
        return dev.argmax(x, tmp)
    out = dev.topk(x, k, tmp)
    scratch_release(tmp)
    return out


def sort_pairs(dev, keys, values):
    tmp = scratch_alloc(keys.nbytes)  # clean: released below
    out = dev.sort(keys, values, tmp)
    scratch_release(tmp)
    return out


class Sampler:
    def __init__(self, dev, vocab):
        self.dev = dev
        self.buf = scratch_alloc(vocab * 4)  # clean: stored, close() releases it

    def resize(self, vocab):
        scratch_release(self.buf)
        self.buf = scratch_alloc(vocab * 4)  # clean: the old one is released first, close() has the new one
        self.dev.set_vocab(vocab)

    def probe(self, sizes):
        for size in sizes:
            tmp = scratch_alloc(size)  # leak: break on the first slow size keeps the scratch
            if self.dev.bandwidth(tmp, size) < 100:
                break
            scratch_release(tmp)

    def close(self):
        scratch_release(self.buf)
