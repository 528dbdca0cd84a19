"""Ring attention: KV shards travel round the context-parallel group while queries stay put.

The math runs on numpy here; the device build swaps ``xp`` for torch.
"""
from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as xp

Array = xp.ndarray


class ShardPool:
    """Flat KV receive shards of (2, tokens, head_dim), recycled between layers."""

    def __init__(self, n: int, tokens: int, head_dim: int) -> None:
        self._shape = (2, tokens, head_dim)
        self._idle: List[Array] = [xp.zeros(self._shape) for _ in range(n)]
        self._out: Dict[int, Array] = {}

    def checkout(self) -> Array:
        if not self._idle:
            raise MemoryError("KV shard pool exhausted")
        shard = self._idle.pop()
        self._out[id(shard)] = shard
        return shard

    def checkin(self, shard: Array) -> None:
        del self._out[id(shard)]
        self._idle.append(shard)

    @property
    def outstanding(self) -> int:
        return len(self._out)


class Ring:
    def __init__(self, rank: int, world: int, source: Callable[[int], Optional[Array]]) -> None:
        self.rank = rank
        self.world = world
        self._source = source

    def recv_into(self, dst: Array, step: int) -> bool:
        data = self._source((self.rank - step) % self.world)
        if data is None:
            return False
        dst[...] = data
        return True


def block_attend(q: Array, kv: Array) -> Tuple[Array, Array]:
    s = q @ kv[0].T / xp.sqrt(q.shape[-1])
    m = s.max(axis=-1, keepdims=True)
    p = xp.exp(s - m)
    z = p.sum(axis=-1, keepdims=True)
    return p @ kv[1] / z, m + xp.log(z)


def merge(out: Optional[Array], lse: Optional[Array], bo: Array, bl: Array) -> Tuple[Array, Array]:
    if out is None or lse is None:
        return bo, bl
    new = xp.logaddexp(lse, bl)
    return out * xp.exp(lse - new) + bo * xp.exp(bl - new), new


def ring_full(q: Array, pool: ShardPool, ring: Ring) -> Array:
    out = lse = None
    cur: Optional[Array] = None
    for step in range(ring.world):
        nxt = pool.checkout()  # clean: near miss, becomes cur, which is returned at the next step or after the loop
        ring.recv_into(nxt, step)
        if cur is not None:
            pool.checkin(cur)
        cur = nxt
        out, lse = merge(out, lse, *block_attend(q, cur))
    if cur is not None:
        pool.checkin(cur)
    return out


def ring_causal(q: Array, pool: ShardPool, ring: Ring) -> Array:
    cur = pool.checkout()  # leak: cur is rebound to nxt in the loop without a checkin
    ring.recv_into(cur, 0)
    out, lse = block_attend(q, cur)
    for step in range(1, ring.rank + 1):
        nxt = pool.checkout()  # leak: replaced by the following step's shard, only the last is returned
        ring.recv_into(nxt, step)
        cur = nxt
        out, lse = merge(out, lse, *block_attend(q, cur))
    pool.checkin(cur)
    return out


def ring_double_buffered(q: Array, pool: ShardPool, ring: Ring) -> Array:
    front = pool.checkout()  # clean: near miss, the pair only swaps names and both go back in finally
    back = pool.checkout()  # clean: near miss, same as front
    out = lse = None
    try:
        ring.recv_into(front, 0)
        for step in range(ring.world):
            if step + 1 < ring.world:
                ring.recv_into(back, step + 1)
            out, lse = merge(out, lse, *block_attend(q, front))
            front, back = back, front
    finally:
        pool.checkin(front)
        pool.checkin(back)
    return out


def fetch_shard(pool: ShardPool, ring: Ring, step: int) -> Optional[Array]:
    shard = pool.checkout()  # clean: returned to the caller, or checked in when the peer has none
    if not ring.recv_into(shard, step):
        pool.checkin(shard)
        return None
    return shard


def key_norms(pool: ShardPool, ring: Ring) -> List[float]:
    norms = []
    for step in range(ring.world):
        shard = fetch_shard(pool, ring, step)  # clean: None skipped, otherwise checked in
        if shard is None:
            continue
        norms.append(float(xp.linalg.norm(shard[0])))
        pool.checkin(shard)
    return norms


def local_snapshot(pool: ShardPool, ring: Ring) -> Optional[Array]:
    shard = fetch_shard(pool, ring, 0)  # leak: copied and dropped
    return None if shard is None else shard.copy()


def remote_snapshot(pool: ShardPool, ring: Ring, step: int) -> Optional[Array]:
    shard = fetch_shard(pool, ring, step)  # clean: near miss, copied and then checked in
    if shard is not None:
        copy = shard.copy()
        pool.checkin(shard)
        return copy
    return None


def ring_striped(q: Array, pool: ShardPool, ring: Ring, depth: int = 2) -> Array:
    """Keep ``depth`` receives ahead of the compute."""
    ahead: Dict[int, Array] = {}
    out = lse = None
    for step in range(ring.world + depth):
        if step < ring.world:
            buf = pool.checkout()  # clean: held in ahead[step], popped and checked in depth steps later
            ring.recv_into(buf, step)
            ahead[step] = buf
        done = ahead.pop(step - depth, None)
        if done is not None:
            out, lse = merge(out, lse, *block_attend(q, done))
            pool.checkin(done)
    return out


def ring_modular(q: Array, pool: ShardPool, ring: Ring, depth: int = 2) -> Array:
    slots: Dict[int, Array] = {}
    out = lse = None
    for step in range(ring.world):
        slots[step % depth] = pool.checkout()  # leak: the entry of step - depth is overwritten
        ring.recv_into(slots[step % depth], step)
        out, lse = merge(out, lse, *block_attend(q, slots[step % depth]))
    for buf in slots.values():
        pool.checkin(buf)
    return out


def iter_shards(pool: ShardPool, ring: Ring) -> Iterator[Array]:
    for step in range(ring.world):
        shard = pool.checkout()  # leak: first_nonempty breaks out at the yield and the checkin never runs
        ring.recv_into(shard, step)
        yield shard
        pool.checkin(shard)


def iter_shards_safe(pool: ShardPool, ring: Ring) -> Iterator[Array]:
    for step in range(ring.world):
        shard = pool.checkout()  # clean: finally also runs when the consumer closes the generator
        try:
            ring.recv_into(shard, step)
            yield shard
        finally:
            pool.checkin(shard)


def first_nonempty(pool: ShardPool, ring: Ring) -> int:
    idx = -1
    for i, shard in enumerate(iter_shards(pool, ring)):
        if shard.any():
            idx = i
            break
    return idx


def any_overflow(pool: ShardPool, ring: Ring, limit: float) -> bool:
    for shard in iter_shards_safe(pool, ring):
        if xp.abs(shard).max() > limit:
            return True
    return False


def ring_backward(q: Array, grad: Array, pool: ShardPool, ring: Ring) -> Tuple[Array, Array]:
    dkv = pool.checkout()  # clean: checked in on the empty way and at the end
    if grad.shape[0] == 0:
        pool.checkin(dkv)
        return xp.zeros_like(q), xp.zeros_like(dkv)
    kv = pool.checkout()  # leak: the masked-out return gives back dkv only
    dkv[...] = 0.0
    dq = xp.zeros_like(q)
    for step in range(ring.world):
        if not ring.recv_into(kv, step):
            pool.checkin(dkv)
            return dq, xp.zeros_like(kv)
        dq += grad @ kv[1].T @ kv[0]
        dkv[0] += grad.sum()
    grads = dkv.copy()
    pool.checkin(kv)
    pool.checkin(dkv)
    return dq, grads


def main() -> None:
    rng = xp.random.default_rng(0)
    shards = [rng.normal(size=(2, 4, 8)) for _ in range(3)]
    ring = Ring(2, 3, lambda r: shards[r])
    pool = ShardPool(16, 4, 8)
    q = rng.normal(size=(4, 8))
    ref = ring_full(q, pool, ring)
    for fn in (ring_double_buffered, ring_striped):
        assert xp.allclose(fn(q, pool, ring), ref)
        assert pool.outstanding == 0
    key_norms(pool, ring), any_overflow(pool, ring, 0.1), remote_snapshot(pool, ring, 1)
    assert pool.outstanding == 0
    for fn in (ring_modular, ring_causal):
        assert xp.allclose(fn(q, pool, ring), ref)
    local_snapshot(pool, ring), first_nonempty(pool, ring), ring_backward(q, q, pool, ring)
    print(pool.outstanding)


if __name__ == "__main__":
    main()
