"""Workspaces for captured graphs and kernels: a bump arena with marks, named shared workspaces."""
from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch

ALIGN = 256


class ArenaFull(RuntimeError):
    pass


class BumpArena:
    """Allocations are undone in stack order through marks."""

    def __init__(self, nbytes: int) -> None:
        self.store = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self.top = 0
        self.marks: dict[int, int] = {}
        self._ids = itertools.count()

    def mark(self) -> int:
        m = next(self._ids)
        self.marks[m] = self.top
        return m

    def rewind(self, mark: int) -> None:
        self.top = self.marks.pop(mark)

    def carve(self, nbytes: int) -> torch.Tensor:
        start = -(-self.top // ALIGN) * ALIGN
        if start + nbytes > self.store.numel():
            raise ArenaFull(nbytes)
        self.top = start + nbytes
        return self.store[start:self.top]

    @contextmanager
    def frame(self) -> Iterator["BumpArena"]:
        m = self.mark()  # clean: rewound in finally
        try:
            yield self
        finally:
            self.rewind(m)


@dataclass
class Workspace:
    name: str
    tensor: torch.Tensor
    refs: int = 0


class WorkspaceRegistry:
    def __init__(self) -> None:
        self._by_name: dict[str, Workspace] = {}

    def ref(self, name: str, nbytes: int) -> Workspace:
        ws = self._by_name.get(name)
        if ws is None:
            ws = self._by_name[name] = Workspace(name, torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        ws.refs += 1
        return ws

    def ref_existing(self, name: str) -> Optional[Workspace]:
        ws = self._by_name.get(name)
        if ws is not None:
            ws.refs += 1
        return ws

    def unref(self, ws: Workspace) -> None:
        ws.refs -= 1
        if ws.refs == 0:
            self._by_name.pop(ws.name, None)


_registry = WorkspaceRegistry()


class KernelPlan:
    """Holds a workspace from plan to end_plan."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ws: Optional[Workspace] = None
        self.indptr: Optional[torch.Tensor] = None

    def plan(self, lengths: list[int]) -> None:
        if self.ws is None:
            self.ws = _registry.ref(self.name, 1 << 20)  # clean: near miss, once per plan, end_plan drops it
        self.indptr = torch.tensor([0] + lengths).cumsum(0)

    def end_plan(self) -> None:
        if self.ws is not None:
            _registry.unref(self.ws)
            self.ws = None


class DecodePlan(KernelPlan):
    """Adds a second workspace for the split reduction."""

    def __init__(self, name: str, splits: int) -> None:
        super().__init__(name)
        self.splits = splits
        self.reduce_ws: Optional[Workspace] = None

    def plan(self, lengths: list[int]) -> None:
        super().plan(lengths)
        if self.splits > 1 and self.reduce_ws is None:
            self.reduce_ws = _registry.ref(self.name + ".reduce", 1 << 18)  # leak: end_plan of the base drops ws only

    def run(self, q: torch.Tensor) -> torch.Tensor:
        return q * (1.0 / max(1, self.splits))


class PrefillPlan(KernelPlan):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mask_ws: Optional[Workspace] = None

    def plan(self, lengths: list[int]) -> None:
        super().plan(lengths)
        if self.mask_ws is None:
            self.mask_ws = _registry.ref(self.name + ".mask", 1 << 22)  # clean: near miss, the overridden end_plan drops it

    def end_plan(self) -> None:
        if self.mask_ws is not None:
            _registry.unref(self.mask_ws)
            self.mask_ws = None
        super().end_plan()


class WorkspaceGuard:
    """with WorkspaceGuard(name): the workspace is there while the block runs."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.ws: Optional[Workspace] = None

    def __enter__(self) -> torch.Tensor:
        self.ws = _registry.ref(self.name, self.nbytes)  # clean: dropped on exit
        return self.ws.tensor

    def __exit__(self, *exc: Any) -> None:
        _registry.unref(self.ws)
        self.ws = None


def with_workspace(name: str, nbytes: int) -> Callable:
    def wrap(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def inner(*args: Any, **kw: Any) -> Any:
            ws = _registry.ref(name, nbytes)  # clean: dropped in finally
            try:
                return fn(ws.tensor, *args, **kw)
            finally:
                _registry.unref(ws)

        return inner

    return wrap


def counted(fn: Callable) -> Callable:
    """The workspace follows the batch size of the call."""

    @functools.wraps(fn)
    def inner(batch: int, *args: Any) -> Any:
        ws = _registry.ref(f"counted.{batch}", batch * 4096)  # leak: the wrapper returns a result for small batches first
        if batch <= 2:
            return fn(ws.tensor, batch, *args)
        out = fn(ws.tensor, batch, *args)
        _registry.unref(ws)
        return out

    return inner


@with_workspace("topk", 1 << 16)
def topk_indices(scratch: torch.Tensor, logits: torch.Tensor, k: int) -> torch.Tensor:
    scratch.zero_()
    return logits.topk(k).indices


class GraphRunner:
    def __init__(self, arena: BumpArena, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.arena = arena
        self.model = model
        self.graphs: dict[int, tuple[Any, int, Workspace]] = {}

    def capture(self, batch: int) -> None:
        if batch in self.graphs:
            return
        m = self.arena.mark()  # clean: near miss, in the table with the graph, forget_from rewinds
        ws = _registry.ref(f"graph.{batch}", batch * 1024)  # clean: in the table, forget_from drops it
        static = self.arena.carve(batch * 4)  # clean: undone with the mark before it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.model(static)
        self.graphs[batch] = (graph, m, ws)

    def forget_from(self, batch: int) -> None:
        """Drops the graph of a batch and all that were captured after it."""
        order = list(self.graphs)
        for later in reversed(order[order.index(batch):]):
            _, m, ws = self.graphs.pop(later)
            self.arena.rewind(m)
            _registry.unref(ws)

    def eager(self, x: torch.Tensor) -> torch.Tensor:
        with self.arena.frame() as arena:  # clean: context manager
            scratch = arena.carve(x.numel() * x.element_size())  # clean: undone by the frame
            scratch.zero_()
            return self.model(x).clone()

    def warmup(self, sizes: list[int], limit: int) -> int:
        runs = 0
        for size in sizes:
            m = self.arena.mark()  # leak: the break at the limit passes by the rewind
            if runs >= limit:
                break
            self.model(self.arena.carve(size))  # clean: undone by the rewind to the mark
            runs += 1
            self.arena.rewind(m)
        return runs

    def measure(self, size: int) -> int:
        before = self.arena.top
        m = self.arena.mark()  # clean: rewound on both branches
        if size == 0:
            self.arena.rewind(m)
            return 0
        self.model(self.arena.carve(size))  # clean: undone with the mark
        used = self.arena.top - before
        self.arena.rewind(m)
        return used

    def stale(self, names: list[str]) -> list[str]:
        """Names no graph has asked for so far."""
        out = []
        for name in names:
            ws = _registry.ref_existing(name)  # leak: an existing workspace is looked at and never dropped again
            if ws is None or ws.refs == 1:
                out.append(name)
        return out

    def in_use(self, name: str) -> int:
        ws = _registry.ref_existing(name)  # clean: dropped after the look
        if ws is None:
            return 0
        others = ws.refs - 1
        _registry.unref(ws)
        return others

    def replay(self, batch: int, x: torch.Tensor) -> Optional[torch.Tensor]:
        with WorkspaceGuard("replay", x.numel()) as scratch:  # clean: context manager
            if batch not in self.graphs:
                return None
            scratch[: x.numel()].copy_(x.view(-1))
            self.graphs[batch][0].replay()
            return scratch.clone()


def run_decode(plans: list[DecodePlan], lengths: list[int], q: torch.Tensor) -> torch.Tensor:
    out = q
    for plan in plans:
        plan.plan(lengths)
        out = plan.run(out)
        plan.end_plan()
    return out
