"""Vision/audio encoder outputs for multimodal requests.

Outputs live in cells of one preallocated tensor. An output can be shared by several
requests with the same media hash; cells go back when the last request is done.
"""
from __future__ import annotations

import hashlib
import logging
import threading
from typing import Dict, Iterable, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


class CellStore:
    def __init__(self, cells: int, tokens_per_cell: int, hidden: int) -> None:
        self.data = torch.empty(cells, tokens_per_cell, hidden)
        self.tokens_per_cell = tokens_per_cell
        self._free: Set[int] = set(range(cells))
        self._lock = threading.Lock()

    def open_cells(self, n: int) -> Optional[List[int]]:
        with self._lock:
            if len(self._free) < n:
                return None
            return [self._free.pop() for _ in range(n)]  # clean: returned to the caller

    def close_cells(self, cells: Iterable[int]) -> None:
        with self._lock:
            self._free.update(cells)

    def open_upto(self, n: int) -> List[int]:
        got: List[int] = []
        with self._lock:
            while self._free and len(got) < n:
                got.append(self._free.pop())  # clean: returned to the caller
        return got


class Output:
    """Cells of one encoded item with the number of requests on it."""

    def __init__(self, key: str, cells: List[int], length: int) -> None:
        self.key = key
        self.cells = cells
        self.length = length
        self.users = 0


def media_key(raw: bytes) -> str:
    return hashlib.sha1(raw).hexdigest()


class EncoderCache:
    def __init__(self, store: CellStore, encoder) -> None:
        self.store = store
        self.encoder = encoder
        self.outputs: Dict[str, Output] = {}
        self.of_request: Dict[str, List[Output]] = {}

    # -- sharing -----------------------------------------------------------

    def join(self, key: str) -> Optional[Output]:
        out = self.outputs.get(key)
        if out is not None:
            out.users += 1
        return out

    def part(self, out: Output) -> None:
        out.users -= 1
        if out.users == 0:
            self.outputs.pop(out.key, None)
            self.store.close_cells(out.cells)

    def encode(self, raw: bytes) -> Optional[Output]:
        """An output the caller is counted on; part() ends that."""
        key = media_key(raw)
        out = self.join(key)  # clean: returned to the caller
        if out is not None:
            return out
        feats = self.encoder(raw)
        need = -(-feats.shape[0] // self.store.tokens_per_cell)
        cells = self.store.open_cells(need)  # clean: owned by the output, part() closes them
        if cells is None:
            return None
        self._scatter(feats, cells)
        out = self.outputs[key] = Output(key, cells, feats.shape[0])
        out.users = 1
        return out

    def _scatter(self, feats: torch.Tensor, cells: List[int]) -> None:
        step = self.store.tokens_per_cell
        for i, cell in enumerate(cells):
            chunk = feats[i * step:(i + 1) * step]
            self.store.data[cell, : chunk.shape[0]].copy_(chunk)

    def gather(self, out: Output) -> torch.Tensor:
        return self.store.data[out.cells].flatten(0, 1)[: out.length]

    # -- requests ----------------------------------------------------------

    def attach(self, rid: str, items: List[bytes]) -> bool:
        got: List[Output] = []
        for raw in items:
            out = self.encode(raw)  # clean: near miss, parted on shortage, else listed in self.of_request
            if out is None:
                for o in got:
                    self.part(o)
                return False
            got.append(out)
        self.of_request.setdefault(rid, []).extend(got)
        return True

    def attach_optional(self, rid: str, items: List[bytes], max_tokens: int) -> int:
        """Attach items until max_tokens is used up; returns how many fit."""
        total, n = 0, 0
        for raw in items:
            out = self.encode(raw)  # leak: the item that exceeds max_tokens is not parted
            if out is None:
                break
            if total + out.length > max_tokens:
                break
            total += out.length
            n += 1
            self.of_request.setdefault(rid, []).append(out)
        return n

    def detach(self, rid: str) -> None:
        for out in self.of_request.pop(rid, []):
            self.part(out)

    def inherit(self, parent: str, child: str) -> None:
        """A forked request uses its parent's media."""
        mine = self.of_request.setdefault(child, [])
        for out in self.of_request.get(parent, []):
            twin = self.join(out.key)  # clean: near miss, the counted output goes into the child's list
            if twin is not None:
                mine.append(twin)

    def embeds(self, raw: bytes) -> Optional[torch.Tensor]:
        out = self.encode(raw)  # leak: the features are cloned and the output is not parted
        if out is None:
            return None
        return self.gather(out).clone()

    def similarity(self, a: bytes, b: bytes) -> Optional[float]:
        left = self.encode(a)  # leak: not parted when the second item can not be encoded
        if left is None:
            return None
        right = self.encode(b)  # clean: parted with the first
        if right is None:
            return None
        score = torch.cosine_similarity(
            self.gather(left).mean(0), self.gather(right).mean(0), dim=0
        )
        self.part(left)
        self.part(right)
        return float(score)

    def has(self, raw: bytes) -> bool:
        return self.join(media_key(raw)) is not None  # leak: the count taken by the lookup is never parted


class VideoStream:
    """Sliding window over the frames of one live video."""

    def __init__(self, cache: EncoderCache, window: int) -> None:
        self.cache = cache
        self.window = window
        self.frames: List[Output] = []
        self.keyframe: Optional[Output] = None

    def add(self, raw: bytes) -> bool:
        out = self.cache.encode(raw)  # clean: near miss, the frame pushed out of the window is parted
        if out is None:
            return False
        self.frames.append(out)
        if len(self.frames) > self.window:
            self.cache.part(self.frames.pop(0))
        return True

    def set_keyframe(self, raw: bytes) -> bool:
        out = self.cache.encode(raw)  # leak: the earlier keyframe is replaced without parting it
        if out is None:
            return False
        self.keyframe = out
        return True

    def close(self) -> None:
        for out in self.frames:
            self.cache.part(out)
        self.frames.clear()
        if self.keyframe is not None:
            self.cache.part(self.keyframe)
            self.keyframe = None


class ChunkedUpload:
    """Audio that arrives in pieces; cells grow with the upload."""

    def __init__(self, store: CellStore, key: str) -> None:
        self.store = store
        self.key = key
        self.cells: List[int] = []
        self.length = 0

    def feed(self, feats: torch.Tensor) -> bool:
        step = self.store.tokens_per_cell
        need = -(-feats.shape[0] // step)
        fresh = self.store.open_upto(need)  # clean: near miss, closed when too few, else joined to self.cells
        if len(fresh) < need:
            self.store.close_cells(fresh)
            return False
        self.cells += fresh
        self.length = (len(self.cells) - need) * step + feats.shape[0]
        return True

    def feed_tail(self, feats: torch.Tensor) -> bool:
        fresh = self.store.open_cells(1)  # leak: a tail longer than one cell is refused after the cell was opened
        if fresh is None:
            return False
        if feats.shape[0] > self.store.tokens_per_cell:
            logger.warning("tail of %s has %d tokens", self.key, feats.shape[0])
            return False
        self.store.data[fresh[0], : feats.shape[0]].copy_(feats)
        self.cells += fresh
        return True

    def publish(self, cache: EncoderCache) -> Output:
        """Hand the cells to the cache; the caller is counted on the output."""
        out = Output(self.key, self.cells, self.length)
        out.users = 1
        cache.outputs[self.key] = out
        self.cells = []
        return out

    def abort(self) -> None:
        self.store.close_cells(self.cells)
        self.cells = []
