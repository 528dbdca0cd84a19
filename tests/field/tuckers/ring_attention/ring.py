"""Ring attention over a context-parallel group."""
import torch
import torch.distributed as dist

from .kvpool import KVPool


def _merge(out, lse, o, l):
    new = torch.logaddexp(lse, l)
    out = out * (lse - new).exp().unsqueeze(-1) + o * (l - new).exp().unsqueeze(-1)
    return out, new


class RingAttention:
    def __init__(self, pool: KVPool, group, attend, causal=True):
        self.pool = pool
        self.group = group
        self.attend = attend
        self.causal = causal
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._saved = {}
        self._sinks = {}

    def _load(self, k, v):
        blk = self.pool.alloc()  # clean: handed to the caller
        if blk is None:
            return None
        blk.storage[0].copy_(k)
        blk.storage[1].copy_(v)
        return blk

    def _shift(self, cur):
        """Send cur on and return the neighbour's block; cur's reference is consumed."""
        nxt = self.pool.alloc()  # clean: handed to the caller
        if nxt is None:
            cur.drop()
            return None
        ops = [
            dist.P2POp(dist.isend, cur.storage, (self.rank + 1) % self.world, self.group),
            dist.P2POp(dist.irecv, nxt.storage, (self.rank - 1) % self.world, self.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        nxt.step = cur.step + 1
        cur.drop()
        return nxt

    def forward(self, q, k, v):
        cur = self._load(k, v)  # clean: near miss, consumed by _shift or dropped after the last step
        if cur is None:
            return None
        out, lse = self.attend(q, cur.storage[0], cur.storage[1])
        for _ in range(self.world - 1):
            cur = self._shift(cur)  # clean: near miss, the old block is consumed and the last one dropped below
            if cur is None:
                return None
            o, l = self.attend(q, cur.storage[0], cur.storage[1])
            out, lse = _merge(out, lse, o, l)
        cur.drop()
        return out

    def forward_windowed(self, q, k, v, window):
        """Stops rotating when the visiting block lies outside the window."""
        cur = self._load(k, v)  # clean: near miss, consumed by the first _shift or dropped at the end
        if cur is None:
            return None
        out, lse = self.attend(q, cur.storage[0], cur.storage[1])
        for step in range(1, self.world):
            cur = self._shift(cur)  # leak: returned from inside the loop at the window's edge without drop
            if cur is None:
                return None
            if step * k.shape[0] >= window:
                return out
            o, l = self.attend(q, cur.storage[0], cur.storage[1])
            out, lse = _merge(out, lse, o, l)
        cur.drop()
        return out

    # saved blocks for backward -------------------------------------------------------------

    def save(self, layer, k, v):
        old = self._saved.pop(layer, None)
        if old is not None:
            old.drop()
        blk = self._load(k, v)  # clean: kept in _saved, take() hands it to backward and clear() drops the rest
        if blk is not None:
            self._saved[layer] = blk
        return blk is not None

    def take(self, layer):
        return self._saved.pop(layer)

    def backward(self, layer, grad):
        blk = self.take(layer)  # clean: dropped after the gradient is formed
        dk = torch.einsum("shd,shd->shd", grad, blk.storage[1])
        dv = torch.einsum("shd,shd->shd", grad, blk.storage[0])
        blk.drop()
        return dk, dv

    def recompute(self, layer, q):
        blk = self.take(layer)  # leak: taken out of the table and never dropped
        out, _ = self.attend(q, blk.storage[0], blk.storage[1])
        return out.detach().requires_grad_()

    def clear(self):
        for blk in self._saved.values():
            blk.drop()
        self._saved.clear()

    # attention sinks -----------------------------------------------------------------------

    def set_sink(self, layer, k, v):
        blk = self._load(k, v)  # leak: a second call for the same layer overwrites the first block in the dict
        if blk is None:
            return False
        self._sinks[layer] = blk
        return True

    def clear_sinks(self):
        while self._sinks:
            _, blk = self._sinks.popitem()
            blk.drop()

    def follow_sinks(self, frames):
        """frames yields (layer, k, v), every layer once per refresh."""
        missed = 0
        for layer, k, v in frames:
            if not self.set_sink(layer, k, v):
                missed += 1
        self.clear_sinks()
        return missed
