"""Dilated attention (LongNet style) on a preallocated workspace."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Optional, Sequence

import torch
import torch.nn.functional as F


@dataclass(eq=False)
class Frame:
    offset: int
    length: int
    view: torch.Tensor


class Workspace:
    """First-fit frames on one slab. Frames may be popped in any order."""

    def __init__(self, numel: int, device: str = "cuda") -> None:
        self._slab = torch.empty(numel, device=device)
        self._frames: list[Frame] = []

    def push(self, *shape: int) -> Frame:
        need = 1
        for n in shape:
            need *= n
        at = 0
        for frame in self._frames:
            if frame.offset - at >= need:
                break
            at = frame.offset + frame.length
        if at + need > self._slab.numel():
            raise MemoryError(f"workspace: {need} floats wanted")
        frame = Frame(at, need, self._slab[at:at + need].view(*shape))
        self._frames.append(frame)
        self._frames.sort(key=lambda f: f.offset)
        return frame

    def pop(self, frame: Frame) -> None:
        self._frames.remove(frame)

    @property
    def in_use(self) -> int:
        return sum(f.length for f in self._frames)


@contextmanager
def scratch(ws: Workspace, *shape: int):
    frame = ws.push(*shape)  # clean: popped in the finally
    try:
        yield frame.view
    finally:
        ws.pop(frame)


def take_segments(x: torch.Tensor, ws: Workspace, seg: int, rate: int, shift: int = 0) -> Frame:
    """Every rate-th position of each segment, packed."""
    b, n, d = x.shape
    frame = ws.push(b * (n // seg), seg // rate, d)  # clean: handed on to the caller
    frame.view.copy_(x.view(b * (n // seg), seg, d)[:, shift::rate])
    return frame


def dilated_branch(q, k, v, ws: Workspace, seg: int, rate: int) -> torch.Tensor:
    qf = take_segments(q, ws, seg, rate)  # clean: popped below
    with scratch(ws, *qf.view.shape) as ks:  # clean: left at the end of the block
        ks.copy_(k.view(-1, seg, k.shape[-1])[:, ::rate])
        with scratch(ws, *qf.view.shape) as vs:  # clean: left at the end of the block
            vs.copy_(v.view(-1, seg, v.shape[-1])[:, ::rate])
            out = F.scaled_dot_product_attention(qf.view, ks, vs)
    ws.pop(qf)
    return out


def branch_scores(q, k, ws: Workspace, seg: int, rate: int) -> torch.Tensor:
    qf = take_segments(q, ws, seg, rate)  # clean: popped before the return
    kf = take_segments(k, ws, seg, rate)  # leak: only the query frame is popped
    scores = torch.softmax(qf.view @ kf.view.transpose(-1, -2), dim=-1)
    ws.pop(qf)
    return scores


def mix_branches(x, ws: Workspace, plan: Sequence[tuple[int, int]], weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for i, (seg, rate) in enumerate(plan):
        frame = take_segments(x, ws, seg, rate)  # leak: a branch of weight zero is skipped with its frame
        w = float(weights[i])
        if w == 0.0:
            continue
        b, n, d = x.shape
        total.view(b * (n // seg), seg, d)[:, ::rate].add_(frame.view, alpha=w)
        ws.pop(frame)
    return total


def pad_to_segment(x: torch.Tensor, ws: Workspace, seg: int) -> tuple[torch.Tensor, Optional[Frame]]:
    """The padded tensor and the frame behind it; no frame when x fits as it is."""
    b, n, d = x.shape
    rest = -n % seg
    if rest == 0:
        return x, None
    frame = ws.push(b, n + rest, d)  # clean: near miss, the second half of the result
    frame.view[:, :n].copy_(x)
    frame.view[:, n:].zero_()
    return frame.view, frame


def padded_attention(q, k, v, ws: Workspace, seg: int, rate: int) -> torch.Tensor:
    n = q.shape[1]
    qp, qframe = pad_to_segment(q, ws, seg)  # clean: near miss, popped where there is a frame
    kp, kframe = pad_to_segment(k, ws, seg)  # clean: near miss, popped where there is a frame
    out = dilated_branch(qp, kp, v, ws, seg, rate)[:, :n].clone()
    for frame in (qframe, kframe):
        if frame is not None:
            ws.pop(frame)
    return out


def padded_length(x, ws: Workspace, segs: Sequence[int]) -> int:
    longest = x.shape[1]
    for seg in segs:
        padded, _ = pad_to_segment(x, ws, seg)  # leak: the frame is thrown away with the underscore
        longest = max(longest, padded.shape[1])
    return longest


class SegmentWindow:
    """Collects rows of a segment and hands them to a sink at the end of the block."""

    def __init__(self, ws: Workspace, rows: int, dim: int, sink) -> None:
        self._ws, self._rows, self._dim, self._sink = ws, rows, dim, sink
        self._frame: Optional[Frame] = None
        self._written = 0

    def __enter__(self) -> "SegmentWindow":
        self._frame = self._ws.push(self._rows, self._dim)  # leak: __exit__ returns early when no row was written
        return self

    def add(self, row: torch.Tensor) -> None:
        self._frame.view[self._written].copy_(row)
        self._written += 1

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._written == 0:
            return False
        if exc_type is None:
            self._sink(self._frame.view[: self._written].clone())
        self._ws.pop(self._frame)
        return False


class LseTracker:
    """Running log-sum-exp over the branches of one layer."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._lse: Optional[Frame] = None

    def begin(self, batch: int, length: int) -> None:
        if self._lse is not None:
            self._ws.pop(self._lse)
        self._lse = self._ws.push(batch, length)  # clean: near miss, popped by finish or by the next begin
        self._lse.view.fill_(-torch.inf)

    def merge(self, branch: torch.Tensor) -> None:
        self._lse.view.copy_(torch.logaddexp(self._lse.view, branch))

    def finish(self) -> torch.Tensor:
        out = self._lse.view.clone()
        self._ws.pop(self._lse)
        self._lse = None
        return out


class MaskCache:
    """The mask of the current segment length; rebuilt when the length changes."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws
        self._mask: Optional[Frame] = None
        self._seg = 0

    def get(self, seg: int) -> torch.Tensor:
        if seg != self._seg:
            self._mask = self._ws.push(seg, seg)  # leak: the mask of the former length is overwritten
            self._mask.view.fill_(-torch.inf).triu_(1)
            self._seg = seg
        return self._mask.view

    def close(self) -> None:
        if self._mask is not None:
            self._ws.pop(self._mask)
            self._mask = None
            self._seg = 0


def multi_rate(x, ws: Workspace, rates: Sequence[int], seg: int) -> torch.Tensor:
    with ExitStack() as stack:
        frames = []
        for rate in rates:
            frame = take_segments(x, ws, seg, rate)  # clean: near miss, the exit stack pops it
            stack.callback(ws.pop, frame)
            frames.append(frame.view.mean(dim=1))
        return torch.stack(frames).sum(0)
