"""Workspaces for captured graphs: module-level pool and plain functions."""
from __future__ import annotations

import bisect
import contextlib
import functools
import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

log = logging.getLogger(__name__)

_SIZES = [1 << s for s in range(16, 28)]
_spare: Dict[int, List[torch.Tensor]] = {s: [] for s in _SIZES}
_outstanding = 0
_graph_refs: Dict[str, int] = {}
_graphs: Dict[str, Tuple[Any, torch.Tensor]] = {}
_variants: Dict[str, Tuple[Any, torch.Tensor]] = {}


def ws_alloc(nbytes: int) -> torch.Tensor:
    global _outstanding
    size = _SIZES[min(bisect.bisect_left(_SIZES, nbytes), len(_SIZES) - 1)]
    _outstanding += 1
    if _spare[size]:
        return _spare[size].pop()
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def ws_free(ws: torch.Tensor) -> None:
    global _outstanding
    _outstanding -= 1
    _spare[ws.numel()].append(ws)


def ws_zeroed(nbytes: int) -> torch.Tensor:
    ws = ws_alloc(nbytes)  # clean: handed on to the caller
    ws.zero_()
    return ws


def ws_pair(nbytes: int) -> Tuple[torch.Tensor, torch.Tensor]:
    return (
        ws_alloc(nbytes),  # clean: handed on in the tuple
        ws_zeroed(nbytes),  # clean: handed on in the tuple
    )


@contextlib.contextmanager
def workspace(nbytes: int) -> Iterator[torch.Tensor]:
    ws = ws_alloc(nbytes)  # clean: freed in finally
    try:
        yield ws
    finally:
        ws_free(ws)


def ws_grow(ws: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The same contents in a workspace of at least nbytes; consumes ws."""
    if ws.numel() >= nbytes:
        return ws
    larger = ws_alloc(nbytes)  # clean: handed on, the old one is freed here
    larger[:ws.numel()].copy_(ws)
    ws_free(ws)
    return larger


def ref_graph(key: str) -> Optional[Any]:
    if key not in _graphs:
        return None
    _graph_refs[key] = _graph_refs.get(key, 0) + 1
    return _graphs[key][0]


def unref_graph(key: str) -> None:
    _graph_refs[key] -= 1


def with_workspace(nbytes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: passes a workspace as first argument."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            ws = ws_alloc(nbytes)  # leak: freed only when fn gives a result that is not None
            result = fn(ws, *args, **kwargs)
            if result is None:
                return None
            ws_free(ws)
            return result

        return inner

    return wrap


def capture(key: str, fn: Callable[[torch.Tensor], None], nbytes: int) -> None:
    if key in _graphs:
        return
    ws = ws_zeroed(nbytes)  # clean: near miss, lives with the graph, uncapture() frees it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn(ws)
    _graphs[key] = (graph, ws)


def uncapture(key: str) -> bool:
    if _graph_refs.get(key, 0) > 0:
        return False
    entry = _graphs.pop(key, None)
    if entry is not None:
        ws_free(entry[1])
    return entry is not None


def capture_variant(key: str, fn: Callable[[torch.Tensor], None], nbytes: int) -> None:
    """A variant of a graph; captured again whenever the weights moved."""
    ws = ws_zeroed(nbytes)  # leak: capturing a variant again overwrites the entry and loses its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn(ws)
    _variants[key] = (graph, ws)
    log.info("captured variant %s", key)


def drop_variants() -> None:
    while _variants:
        _, (_, ws) = _variants.popitem()
        ws_free(ws)


def replay(key: str, fallback: Callable[[], None]) -> bool:
    graph = ref_graph(key)  # clean: near miss, unref under the same test
    if graph is not None:
        graph.replay()
    else:
        fallback()
    if graph is not None:
        unref_graph(key)
    return graph is not None


def replay_padded(batch: int, sizes: List[int]) -> int:
    """Replays the smallest captured graph that takes the batch."""
    for size in sorted(sizes):
        key = f"decode-{size}"
        graph = ref_graph(key)  # leak: graphs too small for the batch keep their reference
        if graph is None or size < batch:
            continue
        graph.replay()
        unref_graph(key)
        return size
    return 0


def softmax_lse(scores: torch.Tensor) -> torch.Tensor:
    nbytes = scores.numel() * 4
    with workspace(nbytes) as ws:  # clean: the context manager frees, the result is a copy
        view = ws[:nbytes].view(torch.float32).view_as(scores)
        torch.exp(scores, out=view)
        return view.sum(-1).log()


def split_kv(query: torch.Tensor, keys: torch.Tensor, parts: int) -> torch.Tensor:
    ws = ws_alloc(query.shape[0] * 4)  # clean: near miss, ws_grow consumes it, the last one is freed
    out = torch.zeros_like(query)
    for i, chunk in enumerate(keys.chunk(parts)):
        need = (i + 1) * query.shape[0] * 4
        ws = ws_grow(ws, need)  # clean: takes over the previous one, the last one is freed
        out += query @ chunk.transpose(-1, -2) @ chunk
    ws_free(ws)
    return out


def sort_tokens(expert_ids: torch.Tensor) -> torch.Tensor:
    a, b = ws_pair(expert_ids.numel() * 8)  # leak: only the first half of the pair is freed
    keys = a[:expert_ids.numel() * 8].view(torch.int64)
    keys.copy_(expert_ids)
    order = b[:expert_ids.numel() * 8].view(torch.int64)
    torch.argsort(keys, out=order)
    result = order.clone()
    ws_free(a)
    return result


def permute(hidden: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    nbytes = hidden.numel() * hidden.element_size()
    front, back = ws_pair(nbytes)  # clean: near miss, swapped by the loop and both freed
    for _ in range(2):
        front[:nbytes].view(hidden.dtype).view_as(hidden).copy_(hidden[order])
        front, back = back, front
    out = back[:nbytes].view(hidden.dtype).view_as(hidden).clone()
    ws_free(front)
    ws_free(back)
    return out


def histogram(expert_ids: torch.Tensor, experts: int) -> List[int]:
    ws = ws_zeroed(experts * 8)  # leak: tolist() copies, the workspace is dropped
    counts = ws[:experts * 8].view(torch.int64)
    counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
    return counts.tolist()


def reduce_scratch(parts: List[torch.Tensor]) -> torch.Tensor:
    nbytes = parts[0].numel() * 4
    ws = ws_alloc(nbytes)  # leak: rebound when there are more than eight parts, the first is never freed
    if len(parts) > 8:
        ws = ws_zeroed(nbytes * 2)  # clean: freed at the end
    acc = ws[:nbytes].view(torch.float32).view_as(parts[0])
    acc.copy_(parts[0])
    for part in parts[1:]:
        acc.add_(part)
    total = acc.clone()
    ws_free(ws)
    return total
