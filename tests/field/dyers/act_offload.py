"""Activation offload for training: saved tensors go to host slabs during forward and come back in backward."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class SlabRef(NamedTuple):
    index: int
    generation: int


class SlabPool:
    """Slabs named by index and generation, so that a stale ref is noticed. Bitmask of free slabs."""

    def __init__(self, n: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mem = [bytearray(nbytes) for _ in range(n)]
        self._gen = [0] * n
        self._free_mask = (1 << n) - 1

    def rent(self) -> Optional[SlabRef]:
        if self._free_mask == 0:
            return None
        low = self._free_mask & -self._free_mask
        self._free_mask ^= low
        i = low.bit_length() - 1
        return SlabRef(i, self._gen[i])

    def restore(self, ref: SlabRef) -> None:
        if self._gen[ref.index] != ref.generation:
            raise ValueError("stale slab")
        self._gen[ref.index] += 1
        self._free_mask |= 1 << ref.index

    def memory(self, ref: SlabRef) -> bytearray:
        return self._mem[ref.index]

    def count_free(self) -> int:
        return bin(self._free_mask).count("1")


class SavedTensors:
    """pack/unpack pair for `torch.autograd.graph.saved_tensors_hooks`."""

    def __init__(self, pool: SlabPool, min_bytes: int) -> None:
        self.pool = pool
        self.min_bytes = min_bytes
        self._by_key: Dict[int, Tuple[SlabRef, int]] = {}
        self._next_key = 0

    def pack(self, data: bytes) -> Any:
        if len(data) < self.min_bytes:
            return data
        ref = self.pool.rent()  # clean: filed under a key, restored by unpack or reset
        if ref is None:
            return data
        self.pool.memory(ref)[: len(data)] = data
        key = self._next_key
        self._next_key += 1
        self._by_key[key] = (ref, len(data))
        return key

    def unpack(self, packed: Any) -> bytes:
        if not isinstance(packed, int):
            return packed
        ref, n = self._by_key.pop(packed)
        out = bytes(self.pool.memory(ref)[:n])
        self.pool.restore(ref)
        return out

    def reset(self) -> None:
        """Forward without a backward: drop whatever was packed."""
        for ref, _ in self._by_key.values():
            self.pool.restore(ref)
        self._by_key.clear()


class LayerStash:
    """Explicit stash per layer for the recompute schedule."""

    def __init__(self, pool: SlabPool) -> None:
        self.pool = pool
        self.stash: Dict[int, List[SlabRef]] = {}
        self.second: Dict[int, SlabRef] = {}

    def save(self, layer: int, data: bytes) -> bool:
        ref = self.pool.rent()  # leak: data that is too large returns False after renting
        if ref is None:
            return False
        if len(data) > self.pool.nbytes:
            return False
        self.pool.memory(ref)[: len(data)] = data
        self.stash.setdefault(layer, []).append(ref)
        return True

    def save_split(self, layer: int, data: bytes) -> bool:
        step = self.pool.nbytes
        refs: List[SlabRef] = []
        for off in range(0, len(data), step):
            ref = self.pool.rent()  # clean: near miss, for-else adopts, the break way restores all
            if ref is None:
                break
            chunk = data[off:off + step]
            self.pool.memory(ref)[: len(chunk)] = chunk
            refs.append(ref)
        else:
            self.stash.setdefault(layer, []).extend(refs)
            return True
        for ref in refs:
            self.pool.restore(ref)
        return False

    def save_pair(self, layer: int, q: bytes, k: bytes) -> bool:
        a = self.pool.rent()  # leak: a is got but b is not, only the None answer is given
        b = self.pool.rent() if a is not None else None  # clean: stashed, only asked for when a was got
        if a is None or b is None:
            return False
        self.pool.memory(a)[: len(q)] = q
        self.pool.memory(b)[: len(k)] = k
        self.stash.setdefault(layer, []).extend((a, b))
        return True

    def restash(self, layer: int, data: bytes) -> None:
        """Second micro-batch of the same layer."""
        ref = self.pool.rent()  # leak: the layer's entry from an earlier restash is overwritten
        if ref is None:
            raise MemoryError("no slab")
        self.pool.memory(ref)[: len(data)] = data
        self.second[layer] = ref

    def take_second(self, layer: int, n: int) -> bytes:
        ref = self.second.pop(layer, None)
        if ref is None:
            return b""
        out = bytes(self.pool.memory(ref)[:n])
        self.pool.restore(ref)
        return out

    def take(self, layer: int, n: int) -> bytes:
        refs = self.stash.pop(layer, [])
        out = b"".join(bytes(self.pool.memory(r)[:n]) for r in refs)
        for r in refs:
            self.pool.restore(r)
        return out


def recompute(pool: SlabPool, layers: List[Callable[[bytes], bytes]], x: bytes, keep: Callable[[int], bool]) -> List[Tuple[int, SlabRef]]:
    """Checkpoints of the layers that `keep` selects; the caller restores them."""
    kept: List[Tuple[int, SlabRef]] = []
    for i, layer in enumerate(layers):
        x = layer(x)
        ref = pool.rent()  # clean: near miss, unselected ones are restored before the continue
        if ref is None:
            return kept
        if not keep(i):
            pool.restore(ref)
            continue
        pool.memory(ref)[: len(x)] = x
        kept.append((i, ref))
    return kept


def backward(pool: SlabPool, kept: List[Tuple[int, SlabRef]], grad: Callable[[int, bytes], bool]) -> int:
    done = 0
    while kept:
        i, ref = kept.pop()
        ok = grad(i, bytes(pool.memory(ref)))
        pool.restore(ref)
        done += ok
    return done


def train_step(pool: SlabPool, layers: List[Callable[[bytes], bytes]], x: bytes, grad: Callable[[int, bytes], bool]) -> int:
    kept = recompute(pool, layers, x, lambda i: i % 2 == 0)  # clean: backward drains the list
    return backward(pool, kept, grad)


def eval_step(pool: SlabPool, layers: List[Callable[[bytes], bytes]], x: bytes) -> int:
    kept = recompute(pool, layers, x, lambda i: True)  # leak: only counted, the checkpoints are not restored
    return len(kept)


class ScopedSlab:
    def __init__(self, pool: SlabPool) -> None:
        self.pool = pool
        self.ref: Optional[SlabRef] = None

    def __enter__(self) -> Optional[SlabRef]:
        self.ref = self.pool.rent()  # clean: near miss, __exit__ returns early only when nothing was rented
        return self.ref

    def __exit__(self, et: Any, ev: Any, tb: Any) -> bool:
        if self.ref is None:
            return False
        ref, self.ref = self.ref, None
        self.pool.restore(ref)
        return et is BufferError


def peak(pool: SlabPool, data: bytes) -> int:
    with ScopedSlab(pool) as ref:  # clean: with
        if ref is None:
            return 0
        pool.memory(ref)[: len(data)] = data
        return max(pool.memory(ref)[: len(data)])
