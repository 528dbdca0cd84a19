"""Workspaces for tensor-parallel layers: a bump arena, a keyed cache above it, and layers that use both."""
from __future__ import annotations

import functools
from typing import Callable, Dict, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist

Shape = Tuple[int, ...]


class Workspace(Protocol):
    def get_buffer(self, shape: Shape) -> torch.Tensor: ...

    def put_buffer(self, t: torch.Tensor) -> None: ...


class BumpArena:
    """Stack discipline: mark() opens a frame, release(frame) drops all that was carved since."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._top = 0
        self.frames = 0

    def mark(self) -> int:
        self.frames += 1
        return self._top

    def release(self, frame: int) -> None:
        self.frames -= 1
        self._top = frame

    def carve(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        nbytes = n * torch.empty((), dtype=dtype).element_size()
        start = (self._top + 255) & ~255
        self._top = start + nbytes
        return self._raw[start: start + nbytes].view(dtype).view(shape)


class Frame:
    """`with Frame(arena)`: a frame for the block."""

    def __init__(self, arena: BumpArena) -> None:
        self.arena = arena

    def __enter__(self) -> BumpArena:
        self._at = self.arena.mark()  # clean: __exit__ releases it
        return self.arena

    def __exit__(self, *exc) -> None:
        self.arena.release(self._at)


class QuietFrame:
    """Like Frame, and cheap for small blocks."""

    def __init__(self, arena: BumpArena, keep_small: bool) -> None:
        self.arena = arena
        self.keep_small = keep_small

    def __enter__(self) -> BumpArena:
        self._at = self.arena.mark()  # leak: __exit__ returns early for small frames without release
        return self.arena

    def __exit__(self, exc_type, exc, tb) -> bool:
        grown = self.arena._top - self._at
        if self.keep_small and grown < 4096:
            return False
        self.arena.release(self._at)
        return False


class CachedWorkspace:
    """Buffers by shape. Keeps at most `keep` idle ones of a shape."""

    def __init__(self, dtype: torch.dtype, device: str, keep: int = 2) -> None:
        self.dtype = dtype
        self.device = device
        self.keep = keep
        self._idle: Dict[Shape, List[torch.Tensor]] = {}
        self.lent = 0

    def get_buffer(self, shape: Shape) -> torch.Tensor:
        self.lent += 1
        idle = self._idle.get(shape)
        return idle.pop() if idle else torch.empty(shape, dtype=self.dtype, device=self.device)

    def put_buffer(self, t: torch.Tensor) -> None:
        self.lent -= 1
        idle = self._idle.setdefault(tuple(t.shape), [])
        if len(idle) < self.keep:
            idle.append(t)


class TracingWorkspace:
    """Wraps another workspace and records shapes."""

    def __init__(self, inner: Workspace) -> None:
        self.inner = inner
        self.seen: Dict[Shape, int] = {}

    def get_buffer(self, shape: Shape) -> torch.Tensor:
        self.seen[shape] = self.seen.get(shape, 0) + 1
        return self.inner.get_buffer(shape)  # clean: handed to the caller

    def put_buffer(self, t: torch.Tensor) -> None:
        self.inner.put_buffer(t)


class PaddingWorkspace:
    """Rounds the first dimension up and lends a narrowed view; remembers the whole buffer by address."""

    def __init__(self, inner: Workspace, multiple: int) -> None:
        self.inner = inner
        self.multiple = multiple
        self._whole: Dict[int, torch.Tensor] = {}

    def get_buffer(self, shape: Shape) -> torch.Tensor:
        rows = -(-shape[0] // self.multiple) * self.multiple
        whole = self.inner.get_buffer((rows, *shape[1:]))  # clean: near miss, found by its address
        self._whole[whole.data_ptr()] = whole
        return whole[: shape[0]]

    def put_buffer(self, t: torch.Tensor) -> None:
        self.inner.put_buffer(self._whole.pop(t.data_ptr()))


class MirrorWorkspace:
    """Lends a buffer and keeps a shadow of it for comparisons."""

    def __init__(self, inner: Workspace) -> None:
        self.inner = inner
        self._shadow: Dict[int, torch.Tensor] = {}

    def get_buffer(self, shape: Shape) -> torch.Tensor:
        main = self.inner.get_buffer(shape)  # clean: handed to the caller
        self._shadow[main.data_ptr()] = self.inner.get_buffer(shape)  # leak: its pop only drops it
        return main

    def changed(self, t: torch.Tensor) -> bool:
        return not torch.equal(t, self._shadow[t.data_ptr()])

    def put_buffer(self, t: torch.Tensor) -> None:
        self._shadow.pop(t.data_ptr(), None)
        self.inner.put_buffer(t)


# ---- helpers above a workspace ---------------------------------------------------------------


def zeros(ws: Workspace, shape: Shape) -> torch.Tensor:
    buf = ws.get_buffer(shape)  # clean: handed to the caller
    return buf.zero_()


def gathered(ws: Workspace, x: torch.Tensor, group) -> torch.Tensor:
    world = dist.get_world_size(group)
    out = zeros(ws, (world * x.shape[0], *x.shape[1:]))  # clean: handed to the caller
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def with_scratch(shape: Shape) -> Callable:
    """Decorator: the method gets one more argument, a scratch buffer."""

    def wrap(method):
        @functools.wraps(method)
        def inner(self, *args, **kw):
            scratch = self.ws.get_buffer(shape)  # clean: given back in finally
            try:
                return method(self, *args, scratch=scratch, **kw)
            finally:
                self.ws.put_buffer(scratch)

        return inner

    return wrap


class ColumnParallel:
    def __init__(self, weight: torch.Tensor, ws: Workspace, group) -> None:
        self.weight = weight
        self.ws = ws
        self.group = group
        self._input: Optional[torch.Tensor] = None

    def forward_sp(self, x: torch.Tensor) -> torch.Tensor:
        """Sequence parallel: the input is gathered, and kept for backward."""
        self._input = gathered(self.ws, x, self.group)  # clean: near miss, wgrad() puts it back
        return self._input @ self.weight.T

    def wgrad(self, grad: torch.Tensor) -> torch.Tensor:
        total, self._input = self._input, None
        g = grad.T @ total
        self.ws.put_buffer(total)
        return g

    def input_stats(self, x: torch.Tensor) -> Tuple[float, float]:
        whole = gathered(self.ws, x, self.group)  # leak: two numbers are returned, the buffer is dropped
        return float(whole.mean()), float(whole.std())

    def dgrad(self, grad: torch.Tensor) -> torch.Tensor:
        acc = zeros(self.ws, (grad.shape[0], self.weight.shape[1]))  # leak: a clone is returned
        torch.mm(grad, self.weight, out=acc)
        dist.all_reduce(acc, group=self.group)
        return acc.clone()


class RowParallel:
    def __init__(self, weight: torch.Tensor, ws: Workspace, arena: BumpArena, group) -> None:
        self.weight = weight
        self.ws = ws
        self.arena = arena
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Frame(self.arena) as arena:  # clean: the frame is released at the end of the block
            part = arena.carve((x.shape[0], self.weight.shape[0]), x.dtype)
            torch.mm(x, self.weight.T, out=part)
            dist.all_reduce(part, group=self.group)
            return part.clone()

    def forward_masked(self, x: torch.Tensor, mask: torch.Tensor) -> Optional[torch.Tensor]:
        frame = self.arena.mark()  # leak: an empty selection returns inside the frame
        rows = self.arena.carve(tuple(x.shape), x.dtype)
        rows.copy_(x)
        picked = rows[mask]
        if picked.numel() == 0:
            return None
        out = picked @ self.weight.T
        self.arena.release(frame)
        return out

    @with_scratch((4096,))
    def row_norms(self, x: torch.Tensor, scratch: torch.Tensor) -> List[float]:
        n = min(len(x), len(scratch))
        torch.norm(x[:n], dim=-1, out=scratch[:n])
        return scratch[:n].tolist()

    def reduce_scatter(self, y: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        owned = out is None
        if owned:
            rows = y.shape[0] // dist.get_world_size(self.group)
            out = self.ws.get_buffer((rows, y.shape[1]))  # clean: near miss, put back under the same flag
        dist.reduce_scatter_tensor(out, y, group=self.group)
        result = out.clone() if owned else out
        if owned:
            self.ws.put_buffer(out)
        return result

    def reduce_scatter_into(self, y: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
        owned = out is None
        if owned:
            rows = y.shape[0] // dist.get_world_size(self.group)
            out = self.ws.get_buffer((rows, y.shape[1]))  # leak: given back in the case it is not ours
        dist.reduce_scatter_tensor(out, y, group=self.group)
        result = out.clone()
        if not owned:
            self.ws.put_buffer(out)
        return result
