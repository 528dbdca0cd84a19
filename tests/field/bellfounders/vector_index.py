"""IVF index shard for retrieval: search scratch, cell readers, background merges."""
import threading
from contextlib import contextmanager
from typing import NamedTuple, Optional

import torch


class Hits(NamedTuple):
    ids: torch.Tensor
    scores: torch.Tensor


class Workspace:
    """Bump arena over one flat tensor. Regions are freed individually, the top moves
    back when the last region is freed; a full reset happens when none is live."""

    def __init__(self, numel, device="cpu"):
        self.flat = torch.empty(numel, device=device)
        self.top = 0
        self.live = 0

    def carve(self, *shape):
        n = 1
        for s in shape:
            n *= s
        if self.top + n > self.flat.numel():
            return None
        region = self.flat[self.top:self.top + n].view(*shape)
        self.top += n
        self.live += 1
        return region

    def uncarve(self, region):
        self.live -= 1
        if self.live == 0:
            self.top = 0


class CellLocks:
    """Readers/writer counts of the inverted lists."""

    def __init__(self, ncells):
        self.readers = [0] * ncells
        self.writer = [False] * ncells
        self._cv = threading.Condition()

    def enter_read(self, cell):
        with self._cv:
            if not self._cv.wait_for(lambda: not self.writer[cell], timeout=1.0):
                return False
            self.readers[cell] += 1
            return True

    def leave_read(self, cell):
        with self._cv:
            self.readers[cell] -= 1
            self._cv.notify_all()

    def try_write(self, cell):
        with self._cv:
            if self.writer[cell] or self.readers[cell]:
                return False
            self.writer[cell] = True
            return True

    def end_write(self, cell):
        with self._cv:
            self.writer[cell] = False
            self._cv.notify_all()

    @contextmanager
    def writing(self, cell):
        if not self.try_write(cell):  # leak: no finally, the body's DimensionMismatch leaves the cell write-locked
            raise BlockingIOError(cell)
        yield
        self.end_write(cell)


class DimensionMismatch(ValueError):
    pass


class IvfShard:
    def __init__(self, centroids, nprobe=8, scratch_numel=1 << 24):
        self.centroids = centroids
        self.nprobe = nprobe
        self.ws = Workspace(scratch_numel)
        ncells = centroids.shape[0]
        self.locks = CellLocks(ncells)
        self.vectors = [torch.empty(0, centroids.shape[1]) for _ in range(ncells)]
        self.ids = [torch.empty(0, dtype=torch.long) for _ in range(ncells)]

    # -- distances -------------------------------------------------------
    def _coarse(self, q):
        """Scores of every centroid; the region belongs to the caller."""
        out = self.ws.carve(q.shape[0], self.centroids.shape[0])  # clean: handed to the caller
        if out is not None:
            torch.matmul(q, self.centroids.T, out=out)
        return out

    def assign(self, x):
        scores = self._coarse(x)  # clean: uncarved after argmax
        if scores is None:
            return (x @ self.centroids.T).argmax(dim=1)
        best = scores.argmax(dim=1)
        self.ws.uncarve(scores)
        return best

    def probe_list(self, q):
        scores = self._coarse(q)  # leak: topk copies out of the region, which is never uncarved
        if scores is None:
            scores = q @ self.centroids.T
        return torch.topk(scores, min(self.nprobe, scores.shape[1]), dim=1).indices

    def _fine(self, q, cell):
        vecs = self.vectors[cell]
        out = self.ws.carve(q.shape[0], vecs.shape[0])  # clean: handed to the caller
        if out is None:
            return None
        torch.matmul(q, vecs.T, out=out)
        return out

    # -- search ----------------------------------------------------------
    def search_cell(self, q, cell, k) -> Optional[Hits]:
        if not self.locks.enter_read(cell):  # leak: an empty cell returns without leave_read
            return None
        if self.ids[cell].numel() == 0:
            return None
        d = self._fine(q, cell)  # clean: uncarved before the return
        if d is None:
            self.locks.leave_read(cell)
            return None
        top = torch.topk(d, min(k, d.shape[1]), dim=1)
        hits = Hits(self.ids[cell][top.indices], top.values.clone())
        self.ws.uncarve(d)
        self.locks.leave_read(cell)
        return hits

    def search(self, q, cells, k):
        merged = self.ws.carve(len(cells), q.shape[0], k)  # clean: uncarved at the end
        if merged is None:
            return None
        merged.fill_(float("-inf"))
        for row, cell in enumerate(cells):
            if not self.locks.enter_read(cell):  # clean: near miss, each `continue` comes after leave_read or without a grant
                continue
            d = self._fine(q, cell)  # clean: near miss, None is the only path that skips uncarve
            if d is None:
                self.locks.leave_read(cell)
                continue
            n = min(k, d.shape[1])
            merged[row, :, :n] = torch.topk(d, n, dim=1).values
            self.ws.uncarve(d)
            self.locks.leave_read(cell)
        best = merged.amax(dim=0).clone()
        self.ws.uncarve(merged)
        return best

    def rerank(self, q, hits, codebook=None):
        full = self.ws.carve(q.shape[0], hits.ids.shape[1], q.shape[1])  # leak: not uncarved when the second carve has no room
        if full is None:
            return hits
        score = self.ws.carve(q.shape[0], hits.ids.shape[1])  # clean: uncarved with full at the end
        if score is None:
            return hits
        table = codebook if codebook is not None else self.centroids
        full.copy_(table[hits.ids % table.shape[0]])
        torch.sum(full * q.unsqueeze(1), dim=2, out=score)
        order = score.argsort(dim=1, descending=True)
        res = Hits(hits.ids.gather(1, order), score.gather(1, order))
        self.ws.uncarve(score)
        self.ws.uncarve(full)
        return res

    # -- updates ---------------------------------------------------------
    def add(self, cell, ids, x):
        with self.locks.writing(cell):  # leak: DimensionMismatch in the body goes past end_write
            if x.shape[1] != self.centroids.shape[1]:
                raise DimensionMismatch(x.shape)
            self.vectors[cell] = torch.cat([self.vectors[cell], x])
            self.ids[cell] = torch.cat([self.ids[cell], ids])

    def compact(self, threshold):
        """Merges small cells into the nearest big one."""
        for cell in range(len(self.ids)):
            if not self.locks.try_write(cell):  # leak: `break` at the first big cell leaves it write-locked
                continue
            if self.ids[cell].numel() > threshold:
                break
            target = (cell + 1) % len(self.ids)
            self.vectors[target] = torch.cat([self.vectors[target], self.vectors[cell]])
            self.ids[target] = torch.cat([self.ids[target], self.ids[cell]])
            self.locks.end_write(cell)
