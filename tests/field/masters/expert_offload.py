"""Mixture of experts with more experts than memory: a few on the GPU, the rest in pinned host memory."""
from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch

log = logging.getLogger("experts")
Key = tuple[int, int]           # layer, expert


class BadExpert(RuntimeError):
    """Checksum of the stored weights is wrong."""


class HostBufs:
    def __init__(self, n: int, size: int):
        self.mem = [torch.empty(size, dtype=torch.bfloat16, pin_memory=True) for _ in range(n)]
        self._q: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(n):
            self._q.put(i)

    def take(self) -> int:
        return self._q.get()  # clean: returned

    def give(self, i: int) -> None:
        self._q.put(i)


class ExpertCache:
    __slots__ = ("weights", "files", "host", "mu", "pool", "_free", "resident", "users",
                 "loading", "shared", "doomed", "cold", "hits", "loads")

    def __init__(self, nslots, size, files, host: HostBufs, device="cuda", threads=2):
        self.weights = torch.empty(nslots, size, dtype=torch.bfloat16, device=device)
        self.files, self.host = files, host
        self.mu, self.pool = threading.RLock(), ThreadPoolExecutor(threads)
        self._free = list(range(nslots))
        self.resident: OrderedDict[Key, int] = OrderedDict()
        self.users: Counter[int] = Counter()
        self.loading: dict[Key, Future] = {}
        self.shared: dict[int, int] = {}
        self.doomed: set[int] = set()
        self.cold: dict[Key, int] = {}
        self.hits = self.loads = 0

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()  # clean: returned
        for key, s in self.resident.items():
            if self.users[s] == 0:
                return self.resident.pop(key)  # clean: leaves the table as a free slot for the caller
        return None

    def _load(self, key: Key, s: int) -> int:
        w, crc = self.files.read(key)
        hb = self.host.take()  # leak: a wrong checksum raises BadExpert with the host buffer taken
        buf = self.host.mem[hb][:w.numel()]
        buf.copy_(w)
        if zlib.crc32(buf.view(torch.uint8).numpy()) != crc:
            raise BadExpert(f"layer {key[0]} expert {key[1]}")
        self.weights[s, :w.numel()].copy_(buf, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.host.give(hb)
        self.loads += 1
        return s

    def acquire(self, key: Key) -> int | None:
        with self.mu:
            fut = self.loading.pop(key, None)
        if fut is not None:
            got = fut.result()
            with self.mu:
                self.resident[key] = got
        with self.mu:
            s = self.resident.get(key)
            if s is None:
                s = self._slot()  # clean: near miss, free again if it cannot be loaded, else resident
                if s is None:
                    return None
                try:
                    self._load(key, s)
                except BadExpert:
                    self._free.append(s)
                    raise
                self.resident[key] = s
            else:
                self.resident.move_to_end(key)
                self.hits += 1
            self.users[s] += 1
            return s

    def release(self, s: int) -> None:
        with self.mu:
            self.users[s] -= 1
            if self.users[s] == 0 and s in self.doomed:
                self.doomed.discard(s)
                self._free.append(s)

    def prefetch(self, keys) -> int:
        n = 0
        for key in keys:
            with self.mu:
                if key in self.resident or key in self.loading:
                    continue
                s = self._slot()  # leak: only the future knows the slot, and cancel() throws cancelled futures away
                if s is None:
                    break
                self.loading[key] = self.pool.submit(self._load, key, s)
                n += 1
        return n

    def cancel(self, layer: int) -> None:
        """The router chose otherwise."""
        with self.mu:
            for key in [k for k in self.loading if k[0] == layer]:
                if self.loading[key].cancel():
                    del self.loading[key]

    def forget(self, key: Key) -> None:
        with self.mu:
            s = self.resident.pop(key, None)  # clean: near miss, free at once, or doomed and free with its last release
            if s is None:
                return
            if self.users[s]:
                self.doomed.add(s)
            else:
                self._free.append(s)

    def pin_shared(self, layer: int) -> bool:
        if layer in self.shared:
            return True
        s = self.acquire((layer, -1))  # clean: in shared until close()
        if s is None:
            return False
        self.shared[layer] = s
        return True

    def chill(self, key: Key) -> bool:
        if key in self.cold:
            return False
        hb = self.host.take()  # clean: in cold until thaw()
        self.cold[key] = hb
        with self.mu:
            s = self.resident.get(key)
            if s is not None:
                self.host.mem[hb].copy_(self.weights[s])
        return True

    def thaw(self, key: Key) -> None:
        hb = self.cold.pop(key, None)
        if hb is not None:
            self.host.give(hb)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for s in self.shared.values():
            self.release(s)
        self.shared.clear()
        for key in list(self.cold):
            self.thaw(key)


class MoeLayer(torch.nn.Module):
    def __init__(self, cache: ExpertCache, layer: int, d: int, n: int, k: int = 2):
        super().__init__()
        self.cache, self.layer, self.d, self.k = cache, layer, d, k
        self.router = torch.nn.Linear(d, n, bias=False)
        self.missed = 0

    def _expert(self, s: int, x):
        return x @ self.cache.weights[s, :self.d * self.d].view(self.d, self.d)

    def forward(self, x):
        w, ids = self.router(x).softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for e in range(self.router.out_features):
            s = self.cache.acquire((self.layer, e))  # leak: an expert without tokens goes on to the next one unreleased
            if s is None:
                self.missed += 1
                continue
            rows, which = (ids == e).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, self._expert(s, x[rows]) * w[rows, which, None])
            self.cache.release(s)
        return out

    def grouped(self, x, active):
        """All experts at once for the grouped kernel, or None if they don't fit."""
        with ExitStack() as st:
            slots = []
            for e in active:
                s = self.cache.acquire((self.layer, e))  # clean: near miss, the exit stack releases what came so far
                if s is None:
                    return None
                st.callback(self.cache.release, s)
                slots.append(s)
            w = self.cache.weights[slots, :self.d * self.d].view(-1, self.d, self.d)
            return torch.einsum("td,edf->etf", x, w)


def look_ahead(cache: ExpertCache, layer: int, guess: int, x) -> torch.Tensor | None:
    """Run the guessed expert while the router of the layer is still computed."""
    s = cache.acquire((layer, guess))  # leak: slot 0 is false in the finally
    try:
        if s is None:
            return None
        d = x.shape[-1]
        return x @ cache.weights[s, :d * d].view(d, d)
    finally:
        if s:
            cache.release(s)


def move(src: ExpertCache, dst: ExpertCache, key: Key) -> bool:
    a = src.acquire(key)  # leak: no room on the other side, and we return with the source held
    if a is None:
        return False
    b = dst.acquire(key)  # clean: released below
    if b is None:
        return False
    dst.weights[b].copy_(src.weights[a])
    src.release(a)
    dst.release(b)
    src.forget(key)
    return True


def preload(cache: ExpertCache, keys) -> int:
    n = 0
    for key in keys:
        try:
            s = cache.acquire(key)  # clean: released at once, it stays resident
        except BadExpert as e:
            log.error("preload: %s", e)
            continue
        if s is None:
            break
        cache.release(s)
        n += 1
    return n


def balance(caches: list[ExpertCache], load: Counter) -> int:
    """Hot experts from the busiest device to the idlest."""
    busy = max(caches, key=lambda c: sum(load[k] for k in c.resident))
    idle = min(caches, key=lambda c: sum(load[k] for k in c.resident))
    if busy is idle:
        return 0
    hot = sorted(busy.resident, key=lambda k: -load[k])[:4]
    moved = sum(move(busy, idle, k) for k in hot)
    log.info("moved %d of %d experts", moved, len(hot))
    return moved
