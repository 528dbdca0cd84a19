"""Weights live in one arena; regions are cut from it first-fit and healed back into holes."""
import bisect
import zlib
from contextlib import contextmanager

import numpy as np

ALIGN, MIN_HOLE = 64, 1024


class ArenaFull(MemoryError): ...
class BadShard(IOError): ...


class Region:
    __slots__ = ("off", "size", "tag", "view")

    def __init__(r, off, size, tag, view): r.off, r.size, r.tag, r.view = off, size, tag, view


class Arena:
    def __init__(s, nbytes):
        s.mem = np.zeros(nbytes, np.uint8)
        s.holes = [(0, nbytes)]
        s.live = {}

    def cut(s, n, tag=""):
        n = -(-n // ALIGN) * ALIGN
        for i, (_, size) in enumerate(s.holes):
            if size < n:
                continue
            off, size = s.holes.pop(i)  # leak: a rest below MIN_HOLE is neither kept as a hole nor made part of the region
            if size - n >= MIN_HOLE:
                s.holes.insert(i, (off + n, size - n))
            s.live[off] = n
            return Region(off, n, tag, s.mem[off:off + n])
        raise ArenaFull(f"{tag}: {n} bytes, {sum(z for _, z in s.holes)} in holes")

    def heal(s, r):
        n = s.live.pop(r.off)
        i = bisect.bisect(s.holes, (r.off, 0))
        s.holes.insert(i, (r.off, n))
        if i + 1 < len(s.holes) and r.off + n == s.holes[i + 1][0]:
            s.holes[i:i + 2] = [(r.off, n + s.holes[i + 1][1])]
        if i and s.holes[i - 1][0] + s.holes[i - 1][1] == r.off:
            lo, hi = s.holes[i - 1], s.holes[i]
            s.holes[i - 1:i + 1] = [(lo[0], lo[1] + hi[1])]
        r.view = None

    @contextmanager
    def scratch(s, n):
        r = s.cut(n, "scratch")  # clean: healed when the block ends
        try:
            yield r.view
        finally:
            s.heal(r)


def load_tensor(ar, rd, name):
    meta = rd.meta(name)
    r = ar.cut(meta.nbytes, name)  # leak: BadShard is raised with the region cut and not healed
    rd.read_into(name, r.view)
    if zlib.crc32(r.view[:meta.nbytes]) != meta.crc:
        raise BadShard(name)
    return r


def load_layer(ar, rd, names):
    out = {}
    try:
        for nm in names:
            out[nm] = load_tensor(ar, rd, nm)  # clean: near miss, the handler heals the earlier ones, else the dict goes to the caller
    except (BadShard, ArenaFull):
        for r in out.values():
            ar.heal(r)
        raise
    return out


def drop_layer(ar, layer):
    for r in layer.values():
        ar.heal(r)
    layer.clear()


class Tied:
    """Tensors that several parts of a model share."""

    def __init__(s, ar):
        s.ar, s.by = ar, {}

    def get(s, rd, name):
        if name not in s.by:
            s.by[name] = [load_tensor(s.ar, rd, name), 0]  # clean: near miss, put() heals it when the count is down
        s.by[name][1] += 1
        return s.by[name][0]

    def put(s, name):
        ent = s.by[name]
        ent[1] -= 1
        if not ent[1]:
            s.ar.heal(s.by.pop(name)[0])


class Model:
    def __init__(s, ar, tied, plan):
        s.ar, s.tied, s.plan = ar, tied, plan
        s.emb = s.head = None
        s.layers = []

    def load(s, rd):
        s.emb = s.tied.get(rd, "embed")  # clean: unload() puts it
        for names in s.plan:
            s.layers.append(load_layer(s.ar, rd, names))  # leak: swap() overwrites the entry with the layer still cut

    def tie_head(s, rd):
        if s.head is None:
            s.head = s.tied.get(rd, "embed")  # clean: near miss, the same region with a count of its own, put by unload()
        return s.head

    def swap(s, i, rd):
        """Layer i out of another checkpoint."""
        s.layers[i] = load_layer(s.ar, rd, s.plan[i])  # leak: a second swap of the layer overwrites it

    def unload(s):
        for layer in s.layers:
            drop_layer(s.ar, layer)
        s.layers = []
        if s.head is not None:
            s.tied.put("embed")
            s.head = None
        if s.emb is not None:
            s.tied.put("embed")
            s.emb = None


def dequant(ar, q, scale):
    """int8 -> float32; the caller heals the result."""
    r = ar.cut(q.size * 4, q.tag + ".f32")  # clean: goes to the caller
    np.multiply(q.view.view(np.int8), scale, out=r.view.view(np.float32)[: q.size], casting="unsafe")
    return r


def merge(ar, base, down, up, alpha):
    """base + alpha * up @ down, in a new region; None when the arena is too full."""
    try:
        a = dequant(ar, down, alpha)  # leak: the second dequant raises ArenaFull and the handler knows only of None
        b = dequant(ar, up, 1.0)  # clean: healed in the finally
    except ArenaFull:
        return None
    try:
        r = ar.cut(base.size, base.tag + ".merged")  # clean: goes to the caller
        wa, wb = a.view.view(np.float32), b.view.view(np.float32)
        np.add(base.view.view(np.float32), wa[: base.size // 4] * wb[0], out=r.view.view(np.float32))
        return r
    finally:
        ar.heal(b)
        ar.heal(a)


def norms(ar, layer, scales):
    out = {}
    for nm, q in layer.items():
        f = dequant(ar, q, scales[nm])  # clean: healed in the finally
        try:
            out[nm] = float(np.linalg.norm(f.view.view(np.float32)))
        finally:
            ar.heal(f)
    return out


def transpose(ar, r, rows, cols):
    with ar.scratch(r.size) as tmp:  # clean: the context manager heals it
        src = r.view.view(np.float32)[: rows * cols].reshape(rows, cols)
        dst = tmp.view(np.float32)[: rows * cols].reshape(cols, rows)
        dst[:] = src.T
        r.view.view(np.float32)[: rows * cols] = dst.ravel()


def evaluate(ar, tied, rd, plan, cases, forward):
    m = Model(ar, tied, plan)
    try:
        m.load(rd)
        m.tie_head(rd)  # clean: near miss, nothing is bound here, the model keeps it and unload() puts it
        return [forward(m, c) for c in cases]
    finally:
        m.unload()
