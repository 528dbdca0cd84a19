"""Activation offload through saved_tensors_hooks into a fixed set of pinned host slabs."""
import itertools
import threading
from contextlib import contextmanager
from typing import Dict, List, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor


class Slab(object):
    __slots__ = ("buf", "idx", "refs")

    def __init__(self, idx: int, nbytes: int) -> None:
        self.idx = idx
        self.refs = 0
        self.buf = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class PinnedArena(object):
    def __init__(self, n_slabs: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._mu = threading.Lock()
        self._free = [Slab(i, slab_bytes) for i in range(n_slabs)]

    def get(self, nbytes: int) -> Optional[Slab]:
        with self._mu:
            if nbytes > self.slab_bytes or not self._free:
                return None
            slab = self._free.pop()
            slab.refs = 1
            return slab

    def get_run(self, sizes: Sequence[int]) -> Optional[List[Slab]]:
        run: List[Slab] = []
        with self._mu:
            for n in sizes:
                if n > self.slab_bytes or not self._free:
                    return None
                slab = self._free.pop()  # leak: a run that cannot be completed returns None with the first slabs popped
                slab.refs = 1
                run.append(slab)
        return run

    def incref(self, slab: Slab) -> None:
        with self._mu:
            slab.refs += 1

    def put(self, slab: Slab) -> None:
        with self._mu:
            slab.refs -= 1
            if slab.refs == 0:
                self._free.append(slab)


class Ticket(NamedTuple):
    slab: Slab
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    event: Optional[torch.cuda.Event]


class ActivationOffload(object):
    def __init__(self, arena: PinnedArena, min_bytes: int = 1 << 20) -> None:
        self.arena = arena
        self.min_bytes = min_bytes
        self._ids = itertools.count()
        self._live: Dict[int, Ticket] = {}
        self._by_ptr: Dict[int, int] = {}
        self._resident: Dict[str, Ticket] = {}

    def _spill(self, t: Tensor, slab: Slab) -> Ticket:
        nbytes = t.numel() * t.element_size()
        dst = slab.buf[:nbytes].view(t.dtype).view(t.shape)
        dst.copy_(t, non_blocking=True)
        ev = None
        if t.is_cuda:
            ev = torch.cuda.Event()
            ev.record()
        return Ticket(slab, t.shape, t.dtype, t.device, ev)

    def _fetch(self, tk: Ticket) -> Tensor:
        if tk.event is not None:
            tk.event.synchronize()
        nbytes = tk.shape.numel() * torch.empty((), dtype=tk.dtype).element_size()
        return tk.slab.buf[:nbytes].view(tk.dtype).view(tk.shape).to(tk.device, copy=True)

    def pack(self, t: Tensor) -> Union[int, Tensor]:
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or isinstance(t, torch.nn.Parameter):
            return t
        tid = next(self._ids)
        twin = self._by_ptr.get(t.data_ptr())
        if twin is not None and twin in self._live:
            tk = self._live[twin]
            if tk.shape == t.shape and tk.dtype == t.dtype:
                self.arena.incref(tk.slab)  # clean: near miss, the twin has its own ticket and every ticket is put once
                self._live[tid] = tk
                return tid
        slab = self.arena.get(nbytes)  # clean: near miss, kept in the live table and put by unpack or by abort
        if slab is None:
            return t
        self._live[tid] = self._spill(t, slab)
        self._by_ptr[t.data_ptr()] = tid
        return tid

    def unpack(self, h: Union[int, Tensor]) -> Tensor:
        if isinstance(h, Tensor):
            return h
        tk = self._live.pop(h)
        out = self._fetch(tk)
        self.arena.put(tk.slab)
        return out

    def pin_resident(self, name: str, t: Tensor) -> bool:
        slab = self.arena.get(t.numel() * t.element_size())  # leak: abort clears the resident table without putting the slabs
        if slab is None:
            return False
        old = self._resident.pop(name, None)
        if old is not None:
            self.arena.put(old.slab)
        self._resident[name] = self._spill(t, slab)
        return True

    def abort(self) -> None:
        for tk in self._live.values():
            self.arena.put(tk.slab)
        self._live.clear()
        self._by_ptr.clear()
        self._resident.clear()

    @contextmanager
    def region(self):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            try:
                yield self
            finally:
                self.abort()


def stash_optimizer(arena: PinnedArena, state: Dict[str, Tensor]) -> Optional[Dict[str, Slab]]:
    keys = sorted(state)
    run = arena.get_run([state[k].nbytes for k in keys])  # clean: near miss, every slab goes into the dict that restore_optimizer empties
    if run is None:
        return None
    table = dict(zip(keys, run))
    for k, slab in table.items():
        slab.buf[: state[k].nbytes].copy_(state[k].reshape(-1).view(torch.uint8))
    return table


def restore_optimizer(arena: PinnedArena, state: Dict[str, Tensor], table: Dict[str, Slab]) -> None:
    while table:
        k, slab = table.popitem()
        state[k].reshape(-1).view(torch.uint8).copy_(slab.buf[: state[k].nbytes])
        arena.put(slab)


def swap_step(arena: PinnedArena, state: Dict[str, Tensor], fwd_bwd) -> bool:
    table = stash_optimizer(arena, state)  # leak: a skipped step returns False with the table of slabs in hand
    if table is None:
        fwd_bwd()
        return True
    loss = fwd_bwd()
    if not torch.isfinite(loss):
        return False
    restore_optimizer(arena, state, table)
    return True


def broadcast_slab(arena: PinnedArena, t: Tensor, readers) -> None:
    slab = arena.get(t.nbytes)  # clean: near miss, this function's own reference is put at the end
    if slab is None:
        return
    for r in readers:
        arena.incref(slab)  # leak: a reader that refuses the slab never puts the reference counted for it
        if not r.accept(slab, lambda s=slab: arena.put(s)):
            r.mark_stale()
    arena.put(slab)
