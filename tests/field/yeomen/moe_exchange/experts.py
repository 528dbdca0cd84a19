"""Cache of expert weights that do not all fit on the GPU."""
import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, Optional

from .heap import HeapFull, Slab, SymmetricHeap

log = logging.getLogger(__name__)


class ExpertWeights:
    def __init__(self, ident: int, weight: Slab, scales: Optional[Slab]):
        self.ident = ident
        self.weight = weight
        self.scales = scales
        self.users = 0

    def free(self) -> None:
        self.weight.free()
        if self.scales is not None:
            self.scales.free()


class ExpertCache:
    def __init__(self, heap: SymmetricHeap, store, quantised: bool):
        self.heap = heap
        self.store = store
        self.quantised = quantised
        self._cached: "OrderedDict[int, ExpertWeights]" = OrderedDict()
        self._coming: Dict[int, Future] = {}
        self._io = ThreadPoolExecutor(2)  # clean: shut down by close()

    def _evict(self) -> bool:
        for ident, w in self._cached.items():
            if not w.users:
                del self._cached[ident]
                w.weight.free()
                return True
        return False

    def _slab(self, nbytes: int) -> Slab:
        while True:
            try:
                return self.heap.alloc(nbytes, "expert")  # clean: goes to the caller
            except HeapFull:
                if not self._evict():
                    raise

    def _load(self, ident: int) -> ExpertWeights:
        weight = self._slab(self.store.weight_bytes(ident))  # clean: near miss, freed in the handler, otherwise the caller has it
        scales = None
        if self.quantised:
            try:
                scales = self._slab(self.store.scale_bytes(ident))  # leak: _evict frees the weight of its victim and forgets the scales
            except HeapFull:
                weight.free()
                raise
        self.store.read(ident, weight, scales)
        return ExpertWeights(ident, weight, scales)

    def use(self, ident: int) -> ExpertWeights:
        w = self._cached.get(ident)
        if w is None:
            coming = self._coming.pop(ident, None)
            w = coming.result() if coming is not None else self._load(ident)  # clean: kept in the cache
            self._cached[ident] = w
        self._cached.move_to_end(ident)
        w.users += 1
        return w

    def done(self, w: ExpertWeights) -> None:
        w.users -= 1

    def prefetch(self, ident: int) -> None:
        if ident in self._cached or ident in self._coming:
            return
        self._coming[ident] = self._io.submit(self._load, ident)  # clean: near miss, use() takes the result or close() frees it

    def close(self) -> None:
        self._io.shutdown(wait=True)
        for fut in self._coming.values():
            if fut.exception() is None:
                fut.result().free()
        for w in self._cached.values():
            w.free()
        self._coming.clear()
        self._cached.clear()
