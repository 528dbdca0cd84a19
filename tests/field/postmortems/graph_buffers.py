"""Static buffers for captured decode graphs: one set per padded batch size."""
from __future__ import annotations

import bisect


class StaticBuffer:
    def __init__(self, shape):
        self.shape = shape
        self.rows = [0] * shape[0]

    def copy_from(self, xs):
        for i, x in enumerate(xs):
            self.rows[i] = x

    def clone(self):
        twin = StaticBuffer(self.shape)
        twin.rows = list(self.rows)
        return twin


class GraphMemPool:
    """take()/give_back() of static buffers; capture keeps addresses stable."""

    def __init__(self, max_buffers):
        self.room = max_buffers
        self._cached = {}

    def take(self, shape):
        stack = self._cached.get(shape)
        if stack:
            return stack.pop()  # clean: returned to the caller
        if self.room == 0:
            return None
        self.room -= 1  # clean: a new buffer's room comes back when trim() destroys it
        return StaticBuffer(shape)

    def give_back(self, buf):
        self._cached.setdefault(buf.shape, []).append(buf)

    def trim(self):
        for stack in self._cached.values():
            self.room += len(stack)
        self._cached = {}


class CapturedGraph:
    def __init__(self, bs, inp, out):
        self.bs = bs
        self.inp = inp
        self.out = out

    def replay(self, xs):
        self.inp.copy_from(xs)
        self.out.copy_from(x + 1 for x in self.inp.rows)
        return self.out


class GraphRunner:
    def __init__(self, pool, sizes):
        self.pool = pool
        self.sizes = sorted(sizes)
        self.graphs = {}
        self.profile = None

    def _pad(self, n):
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def capture(self, bs):
        if bs in self.graphs:
            return self.graphs[bs]
        inp = self.pool.take((bs, 1))  # leak: the refusal of the output buffer returns with the input taken
        if inp is None:
            return None
        out = self.pool.take((bs, 2))  # clean: the graph owns it, destroy() gives it back
        if out is None:
            return None
        graph = CapturedGraph(bs, inp, out)
        self.graphs[bs] = graph
        return graph

    def recapture(self, bs):
        inp = self.pool.take((bs, 1))  # clean: destroyed with the graph, or returned on refusal
        if inp is None:
            return None
        out = self.pool.take((bs, 2))  # clean: near miss, the previous graph is destroyed before its entry is replaced
        if out is None:
            self.pool.give_back(inp)
            return None
        self.destroy(bs)
        self.graphs[bs] = CapturedGraph(bs, inp, out)
        return self.graphs[bs]

    def capture_all(self):
        for bs in reversed(self.sizes):
            inp = self.pool.take((bs, 1))  # leak: a size captured before has its graph replaced, buffers and all
            if inp is None:
                break
            out = self.pool.take((bs, 2))  # leak: the replaced graph's output buffer goes with it
            if out is None:
                self.pool.give_back(inp)
                break
            self.graphs[bs] = CapturedGraph(bs, inp, out)

    def destroy(self, bs):
        graph = self.graphs.pop(bs, None)
        if graph is None:
            return
        self.pool.give_back(graph.inp)
        self.pool.give_back(graph.out)

    def teardown(self):
        for bs in list(self.graphs):
            self.destroy(bs)

    def run(self, xs):
        bs = self._pad(len(xs))
        graph = self.graphs.get(bs)
        if graph is None:
            return self.run_eager(xs)
        return graph.replay(xs).rows[:len(xs)]

    def run_eager(self, xs):
        tmp = self.pool.take((len(xs), 1))  # leak: the clone is returned and the original dropped
        if tmp is None:
            return list(xs)
        tmp.copy_from(xs)
        result = tmp.clone()
        return result.rows

    def run_eager_copied(self, xs):
        tmp = self.pool.take((len(xs), 1))  # clean: near miss, given back after the rows were copied out
        if tmp is None:
            return list(xs)
        tmp.copy_from(xs)
        result = tmp.clone()
        self.pool.give_back(tmp)
        return result.rows

    def start_profile(self):
        if self.profile is not None:
            return
        self.profile = self.pool.take((1, 1))  # clean: near miss, taken once only and stop_profile() gives it back

    def stop_profile(self):
        buf, self.profile = self.profile, None
        if buf is not None:
            self.pool.give_back(buf)


def warmup(pool, sizes, rounds):
    for _ in range(rounds):
        bufs = [pool.take((bs, 1)) for bs in sizes]  # leak: a refused size skips the round without giving the others back
        if None in bufs:
            continue
        for buf in bufs:
            pool.give_back(buf)


def largest_that_fits(pool, sizes):
    for bs in sorted(sizes, reverse=True):
        buf = pool.take((bs, 1))  # clean: near miss, given back before the return inside the loop
        if buf is None:
            continue
        pool.give_back(buf)
        return bs
    return 0


def pad_batch(pool, xs, bs):
    buf = pool.take((bs, 1))  # leak: an already full batch returns early
    if buf is None or len(xs) == bs:
        return xs
    buf.copy_from(xs)
    rows = list(buf.rows)
    pool.give_back(buf)
    return rows
