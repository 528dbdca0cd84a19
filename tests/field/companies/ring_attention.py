"""Ring attention: K/V blocks rotate between ranks through double buffers."""
import torch
import torch.distributed as dist


class KVRing:
    def __init__(self, n, shape):
        self._free = [torch.empty(2, *shape) for _ in range(n)]

    def get_kv(self):
        return self._free.pop()  # clean: handed to the caller

    def put_kv(self, kv):
        self._free.append(kv)


def _merge(out, lse, o, l):
    new = torch.logaddexp(lse, l)
    return out * (lse - new).exp() + o * (l - new).exp(), new


def _block(q, kv):
    s = q @ kv[0].transpose(-1, -2)
    l = s.logsumexp(-1, keepdim=True)
    return (s - l).exp() @ kv[1], l


def _sendrecv(src, dst, rank, world):
    ops = [
        dist.P2POp(dist.isend, src, (rank + 1) % world),
        dist.P2POp(dist.irecv, dst, (rank - 1) % world),
    ]
    return dist.batch_isend_irecv(ops)


def ring_forward(q, k, v, ring, rank, world):
    cur = ring.get_kv()  # clean: near miss, the names are swapped and both go back
    nxt = ring.get_kv()  # clean: near miss, the names are swapped and both go back
    cur[0].copy_(k)
    cur[1].copy_(v)
    out, lse = _block(q, cur)
    for _ in range(world - 1):
        for w in _sendrecv(cur, nxt, rank, world):
            w.wait()
        cur, nxt = nxt, cur
        o, l = _block(q, cur)
        out, lse = _merge(out, lse, o, l)
    ring.put_kv(cur)
    ring.put_kv(nxt)
    return out


def ring_forward_fresh(q, k, v, ring, rank, world):
    cur = ring.get_kv()  # leak: cur = nxt loses it in the first round
    cur[0].copy_(k)
    cur[1].copy_(v)
    out, lse = _block(q, cur)
    for _ in range(world - 1):
        nxt = ring.get_kv()  # leak: becomes cur and is lost by the next round, only the last goes back
        for w in _sendrecv(cur, nxt, rank, world):
            w.wait()
        cur = nxt
        o, l = _block(q, cur)
        out, lse = _merge(out, lse, o, l)
    ring.put_kv(cur)
    return out


def ring_forward_step(q, k, v, ring, rank, world):
    cur = ring.get_kv()  # clean: near miss, put back before the name moves on
    cur[0].copy_(k)
    cur[1].copy_(v)
    out, lse = _block(q, cur)
    for _ in range(world - 1):
        nxt = ring.get_kv()  # clean: near miss, it is the cur that the next round or the end puts back
        for w in _sendrecv(cur, nxt, rank, world):
            w.wait()
        ring.put_kv(cur)
        cur = nxt
        o, l = _block(q, cur)
        out, lse = _merge(out, lse, o, l)
    ring.put_kv(cur)
    return out


def ring_causal(q, k, v, ring, rank, world):
    cur = ring.get_kv()  # clean: put back behind the loop
    nxt = ring.get_kv()  # leak: the causal stop breaks and only cur is put back
    cur[0].copy_(k)
    cur[1].copy_(v)
    out, lse = _block(q, cur)
    for step in range(world - 1):
        if step >= rank:
            break
        for w in _sendrecv(cur, nxt, rank, world):
            w.wait()
        cur.copy_(nxt)
        o, l = _block(q, cur)
        out, lse = _merge(out, lse, o, l)
    else:
        ring.put_kv(nxt)
    ring.put_kv(cur)
    return out


def stacked(k, v, ring):
    kv = ring.get_kv()  # clean: the buffer is the result
    torch.stack([k, v], out=kv)
    return kv


def key_mean(k, v, ring):
    kv = stacked(k, v, ring)  # leak: the mean of the keys leaves, the pooled pair stays out
    return kv[0].mean(-2)


def key_average(k, v, ring):
    kv = stacked(k, v, ring)  # clean: put back after the mean
    m = kv[0].mean(-2)
    ring.put_kv(kv)
    return m


class RingContext:
    def __init__(self, ring, depth):
        self.ring = ring
        self.depth = depth
        self.saved = []
        self.recent = []

    def save(self, k, v):
        if len(self.saved) == self.depth:
            self.ring.put_kv(self.saved.pop(0))
        self.saved.append(stacked(k, v, self.ring))  # clean: near miss, the oldest is put back first and backward() empties the list

    def save_last(self, k, v):
        kv = stacked(k, v, self.ring)  # leak: the slice drops all but the last few without putting them back
        self.recent.append(kv)
        self.recent = self.recent[-self.depth :]

    def backward(self, grads):
        outs = []
        while self.saved:
            kv = self.saved.pop()
            outs.append(kv[0] * grads)
            self.ring.put_kv(kv)
        while self.recent:
            self.ring.put_kv(self.recent.pop())
        return outs
