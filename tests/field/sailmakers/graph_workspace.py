"""CUDA graph capture: static input buffers by batch size, attention workspaces and a bump arena for capture time."""
import bisect
import gc
import logging
import threading
import weakref

import torch

log = logging.getLogger(__name__)

CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]


def pad_size(n):
    i = bisect.bisect_left(CAPTURE_SIZES, n)
    return CAPTURE_SIZES[i] if i < len(CAPTURE_SIZES) else None


class WorkspacePool:
    """Attention workspaces (split-K partials). Count bounded, made lazily."""

    def __init__(self, limit, nbytes, device="cuda"):
        self.limit, self.nbytes, self.device = limit, nbytes, device
        self.made = 0
        self.idle = []
        self.mu = threading.Lock()

    def checkout(self):
        with self.mu:
            if self.idle:
                return self.idle.pop()  # clean: returned to the caller
            if self.made == self.limit:
                return None
            self.made += 1
        return torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def checkout_zeroed(self, min_bytes=0):
        ws = self.checkout()  # leak: a workspace below min_bytes is neither returned nor put back
        if ws is None:
            return None
        if ws.numel() < min_bytes:
            return None
        return ws.zero_()

    def putback(self, ws):
        with self.mu:
            self.idle.append(ws)


class Arena:
    """mark()/rewind() bump allocator; marks nest."""

    def __init__(self, nbytes, device="cuda"):
        self.buf = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.top = 0
        self.marks = []

    def mark(self):
        self.marks.append(self.top)
        return len(self.marks)

    def rewind(self, depth):
        self.top = self.marks[depth - 1]
        del self.marks[depth - 1:]

    def carve(self, nbytes):
        off = -(-self.top // 256) * 256
        if off + nbytes > self.buf.numel():
            return None
        self.top = off + nbytes
        return self.buf[off:off + nbytes]


class WorkspaceScope:
    def __init__(self, pool, wait_event=None):
        self.pool = pool
        self.event = wait_event
        self.ws = None

    def __enter__(self):
        self.ws = self.pool.checkout()  # leak: __exit__ returns early while the event has not completed
        return self.ws

    def __exit__(self, et, ev, tb):
        if self.ws is None:
            return False
        if self.event is not None and not self.event.query():
            log.debug("workspace still in use by the side stream")
            return False
        self.pool.putback(self.ws)
        self.ws = None
        return False


class SyncScope:
    def __init__(self, pool, stream):
        self.pool, self.stream = pool, stream
        self.ws = None

    def __enter__(self):
        self.ws = self.pool.checkout()  # clean: __exit__ puts it back on every path
        if self.ws is None:
            raise RuntimeError("no attention workspace left")
        return self.ws

    def __exit__(self, et, ev, tb):
        ws, self.ws = self.ws, None
        if et is None:
            self.stream.synchronize()
        self.pool.putback(ws)


class StaticInputs:
    def __init__(self, size, hidden, device):
        self.size = size
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.pos = torch.zeros(size, dtype=torch.int64, device=device)
        self.out = torch.zeros(size, hidden, device=device)


class InputBank:
    def __init__(self, hidden, copies=2, device="cuda"):
        self.by_size = {s: [StaticInputs(s, hidden, device) for _ in range(copies)] for s in CAPTURE_SIZES}

    def fetch(self, n):
        size = pad_size(n)
        if size is None:
            return None
        shelf = self.by_size[size]
        return shelf.pop() if shelf else None  # clean: returned to the caller

    def restore(self, si):
        self.by_size[si.size].append(si)

    def fetch_or_larger(self, n):
        for size in CAPTURE_SIZES:
            if size < n:
                continue
            si = self.fetch(size)  # clean: near miss, rebinding happens only when it is None
            if si is not None:
                return si
        return None


class GraphRunner:
    def __init__(self, model, pool, bank, arena):
        self.model, self.pool, self.bank, self.arena = model, pool, bank, arena
        self.graphs = {}
        self.graph_ws = {}
        self.overflow = None

    def capture(self, size):
        si = self.bank.fetch(size)  # clean: restored after the capture and when no workspace is left
        if si is None:
            return False
        ws = self.pool.checkout()  # clean: near miss, kept in self.graph_ws, which destroy() empties
        if ws is None:
            self.bank.restore(si)
            return False
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            si.out.copy_(self.model(si.ids, si.pos, ws))
        self.drop_graph(size)
        self.graphs[size] = g
        self.graph_ws[size] = ws
        self.bank.restore(si)
        return True

    def capture_all(self, mem_floor):
        d = self.arena.mark()  # leak: low memory returns without rewind
        for size in reversed(CAPTURE_SIZES):
            free, _ = torch.cuda.mem_get_info()
            if free < mem_floor:
                log.warning("graph capture stopped at size %d", size)
                return False
            self.capture(size)
        self.arena.rewind(d)
        return True

    def drop_graph(self, size):
        self.graphs.pop(size, None)
        ws = self.graph_ws.pop(size, None)
        if ws is not None:
            self.pool.putback(ws)

    def replay(self, ids, pos):
        n = ids.numel()
        si = self.bank.fetch_or_larger(n)  # leak: not restored when the fetched size has no graph
        if si is None:
            return self._eager(ids, pos)
        g = self.graphs.get(si.size)
        if g is None:
            return self._eager(ids, pos)
        si.ids[:n].copy_(ids)
        si.pos[:n].copy_(pos)
        g.replay()
        out = si.out[:n].clone()
        self.bank.restore(si)
        return out

    def _eager(self, ids, pos):
        with SyncScope(self.pool, torch.cuda.current_stream()) as ws:  # clean: context manager
            return self.model(ids, pos, ws)

    def overlapped(self, ids, pos, event):
        with WorkspaceScope(self.pool, event) as ws:  # leak: the scope keeps the workspace when the event is pending
            if ws is None:
                return None
            return self.model(ids, pos, ws)

    def prefill(self, chunks):
        outs = []
        ws = self.pool.checkout()  # clean: near miss, falls back to self.overflow only when None, put back at the end
        own = ws is not None
        if not own:
            ws = self._overflow()
        for ids, pos in chunks:
            outs.append(self.model(ids, pos, ws))
        if own:
            self.pool.putback(ws)
        return torch.cat(outs)

    def _overflow(self):
        if self.overflow is None:
            self.overflow = torch.empty(self.pool.nbytes, dtype=torch.uint8, device=self.pool.device)
        return self.overflow

    def mixed(self, ids, pos, use_zeroed):
        ws = None
        if use_zeroed:
            ws = self.pool.checkout_zeroed()  # clean: near miss, put back under the same flag
            if ws is None:
                return None
        out = self.model(ids, pos, ws)
        if use_zeroed:
            self.pool.putback(ws)
        return out

    def destroy(self):
        for size in list(self.graph_ws):
            self.drop_graph(size)
        gc.collect()
