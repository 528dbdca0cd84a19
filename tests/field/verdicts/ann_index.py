"""IVF index with per-query scratch heaps."""
import heapq
import threading
from typing import Callable, Dict, List, Optional, Tuple

import torch


class ScratchHeap:
    __slots__ = ("items", "dist")

    def __init__(self, width: int):
        self.items: List[Tuple[float, int]] = []
        self.dist = torch.empty(width)


class ScratchRack:
    def __init__(self, n: int, width: int):
        self._width = width
        self._lock = threading.Lock()
        self._rack = [ScratchHeap(width) for _ in range(n)]

    def obtain(self) -> ScratchHeap:
        self._lock.acquire()  # clean: near miss, released before each of the two exits
        if not self._rack:
            self._lock.release()
            return ScratchHeap(self._width)
        heap = self._rack.pop()
        self._lock.release()
        return heap

    def recycle(self, heap: ScratchHeap) -> None:
        heap.items.clear()
        with self._lock:
            self._rack.append(heap)

    def shrink(self, keep: int) -> int:
        self._lock.acquire()  # leak: nothing-to-do return leaves the lock held
        if len(self._rack) <= keep:
            return 0
        gone = len(self._rack) - keep
        del self._rack[keep:]
        self._lock.release()
        return gone


class IVFIndex:
    def __init__(self, centroids: torch.Tensor, rack: ScratchRack, nprobe: int = 8):
        self.centroids = centroids
        self.rack = rack
        self.nprobe = nprobe
        self.lists: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
        self.rw = threading.RLock()

    def add(self, cid: int, ids: torch.Tensor, vecs: torch.Tensor) -> bool:
        if not self.rw.acquire(timeout=1.0):  # clean: near miss, a failed acquire holds nothing, success is released in finally
            return False
        try:
            if cid in self.lists:
                old_ids, old_vecs = self.lists[cid]
                ids, vecs = torch.cat([old_ids, ids]), torch.cat([old_vecs, vecs])
            self.lists[cid] = (ids, vecs)
            return True
        finally:
            self.rw.release()

    def remove(self, cid: int) -> bool:
        self.rw.acquire()  # leak: unknown list returns with the lock held
        if cid not in self.lists:
            return False
        del self.lists[cid]
        self.rw.release()
        return True

    def _probe(self, q: torch.Tensor) -> List[int]:
        d = torch.cdist(q[None], self.centroids)[0]
        return torch.topk(d, min(self.nprobe, d.numel()), largest=False).indices.tolist()

    def search(self, q: torch.Tensor, k: int) -> List[int]:
        heap = self.rack.obtain()  # clean: near miss, continue stays in the loop and recycle follows it
        for cid in self._probe(q):
            if cid not in self.lists:
                continue
            ids, vecs = self.lists[cid]
            d = (vecs - q).square().sum(-1)
            for dist, i in zip(d.tolist(), ids.tolist()):
                heapq.heappush(heap.items, (dist, i))
        best = [i for _, i in heapq.nsmallest(k, heap.items)]
        self.rack.recycle(heap)
        return best

    def search_filtered(self, q: torch.Tensor, k: int, allow: Optional[Callable[[int], bool]]) -> List[int]:
        heap = self.rack.obtain()  # leak: without a filter the search is delegated and the heap kept
        if allow is None:
            return self.search(q, k)
        for cid in self._probe(q):
            ids, vecs = self.lists.get(cid, (torch.empty(0), torch.empty(0, q.numel())))
            for v, i in zip(vecs, ids.tolist()):
                if allow(i):
                    heapq.heappush(heap.items, (float((v - q).square().sum()), i))
        best = [i for _, i in heapq.nsmallest(k, heap.items)]
        self.rack.recycle(heap)
        return best

    def _scan(self, cid: int, q: torch.Tensor, heap: Optional[ScratchHeap] = None) -> ScratchHeap:
        if heap is None:
            heap = self.rack.obtain()  # clean: returned to the caller
        ids, vecs = self.lists[cid]
        for v, i in zip(vecs, ids.tolist()):
            heap.items.append((float((v - q).norm()), i))
        return heap

    def nearest_in(self, cid: int, q: torch.Tensor) -> int:
        heap = self._scan(cid, q)  # clean: recycled after the minimum was read
        best = min(heap.items)[1]
        self.rack.recycle(heap)
        return best

    def count_within(self, cid: int, q: torch.Tensor, radius: float) -> int:
        return sum(d <= radius for d, _ in self._scan(cid, q).items)  # leak: heap lives only in the expression

    def scan_many(self, cids: List[int], q: torch.Tensor) -> List[Tuple[float, int]]:
        heap = self.rack.obtain()  # clean: near miss, _scan fills the heap it is given and it is recycled once
        for cid in cids:
            self._scan(cid, q, heap)  # clean: a heap is passed in, none is obtained
        merged = sorted(heap.items)
        self.rack.recycle(heap)
        return merged

    def search_batch(self, qs: torch.Tensor) -> Dict[int, int]:
        heaps = {n: self._scan(self._probe(q)[0], q) for n, q in enumerate(qs)}  # leak: empty heaps are left out of the recycling loop
        out = {}
        for n, heap in heaps.items():
            if heap.items:
                out[n] = min(heap.items)[1]
                self.rack.recycle(heap)
        return out
