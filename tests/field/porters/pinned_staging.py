"""Host-side staging buffers between the tokenizer, the GPU and the sampler."""
from __future__ import annotations

import collections

import torch


class PinnedPool:
    def __init__(self, nbytes, count):
        self._nbytes = nbytes
        self._idle = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    def take(self):
        if not self._idle:
            return None
        return self._idle.pop()

    def give(self, buf):
        self._idle.append(buf)


class InputStager:
    def __init__(self, pool, device):
        self.pool = pool
        self.device = device
        self.ids_buf = None

    def prepare(self, token_ids):
        """Called once per engine step."""
        self.ids_buf = self.pool.take()  # leak: the next step refills the field, close returns only the last
        view = self.ids_buf[:token_ids.nbytes].view(token_ids.dtype)
        view.copy_(token_ids)
        return view.to(self.device, non_blocking=True)

    def close(self):
        if self.ids_buf is not None:
            self.pool.give(self.ids_buf)
            self.ids_buf = None


class AlternatingStager:
    def __init__(self, pool):
        self.pool = pool
        self.sides = [None, None]
        self.turn = 0

    def next_buffer(self):
        self.turn ^= 1
        if self.sides[self.turn] is not None:
            self.pool.give(self.sides[self.turn])
        self.sides[self.turn] = self.pool.take()  # clean: near miss, the side's old buffer is given back just before
        return self.sides[self.turn]

    def close(self):
        for side in self.sides:
            if side is not None:
                self.pool.give(side)
        self.sides = [None, None]


class LogitsFetcher:
    def __init__(self, pool):
        self.pool = pool
        self.pending = collections.deque()

    def fetch(self, rid, logits):
        buf = self.pool.take()  # clean: queued, poll gives it back when its copy is done
        if buf is None:
            return False
        buf[:logits.nbytes].copy_(logits.view(torch.uint8), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.pending.append((rid, done, buf))
        return True

    def poll(self, sink):
        while self.pending and self.pending[0][1].query():
            rid, _, buf = self.pending.popleft()
            sink(rid, buf.clone())
            self.pool.give(buf)


class LayerStreamer:
    """Keeps the next few offloaded layers staged on the host."""

    def __init__(self, pool, read_layer, ahead):
        self.pool = pool
        self.read_layer = read_layer
        self.ahead = ahead
        self.staged = {}

    def step(self, layer):
        for nxt in range(layer + 1, layer + 1 + self.ahead):
            buf = self.pool.take()  # leak: with ahead > 1 the same layer is staged again by the next step and overwritten
            if buf is None:
                break
            self.read_layer(nxt, buf)
            self.staged[nxt] = buf
        mine = self.staged.pop(layer, None)
        if mine is None:
            return None
        out = mine.to("cuda")
        self.pool.give(mine)
        return out


class BatchAssembler:
    def __init__(self, pool):
        self.pool = pool
        self.live = {}

    def assemble(self, step_id):
        """step_id counts up over the life of the engine."""
        ids = self.pool.take()  # clean: given back on both failures, else with the entry
        if ids is None:
            return None
        positions = self.pool.take()  # leak: when the mask buffer is missing only ids is given back
        if positions is None:
            self.pool.give(ids)
            return None
        mask = self.pool.take()  # clean: near miss, kept in the entry that retire empties
        if mask is None:
            self.pool.give(ids)
            return None
        self.live[step_id] = (ids, positions, mask)
        return self.live[step_id]

    def retire(self, step_id):
        for buf in self.live.pop(step_id):
            self.pool.give(buf)


class EmbeddingReturner:
    """Returns embedding vectors; the buffer goes back when the reader is done."""

    def __init__(self, pool):
        self.pool = pool
        self.on_done = {}

    def emit(self, req, vector):
        buf = self.pool.take()  # leak: a request without stream gets no completion entry that would give the buffer back
        if buf is None:
            return None
        buf[:vector.nbytes].copy_(vector.view(torch.uint8))
        if req.stream:
            self.on_done[req.rid] = lambda: self.pool.give(buf)
        return buf[:vector.nbytes]

    def finished(self, rid):
        done = self.on_done.pop(rid, None)
        if done is not None:
            done()


class TwoStageMover:
    def __init__(self, pool):
        self.pool = pool
        self.filling = {}
        self.flying = {}

    def open(self, key):
        if key in self.filling or key in self.flying:
            return False
        buf = self.pool.take()  # clean: near miss, moves from filling to flying and ends in land or drop
        if buf is None:
            return False
        self.filling[key] = buf
        return True

    def launch(self, key, device):
        buf = self.filling.pop(key)
        self.flying[key] = buf
        return buf.to(device, non_blocking=True)

    def land(self, key):
        self.pool.give(self.flying.pop(key))

    def drop(self, key):
        buf = self.filling.pop(key, None)
        if buf is None:
            buf = self.flying.pop(key, None)
        if buf is not None:
            self.pool.give(buf)
