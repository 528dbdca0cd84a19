"""Copies between device tensors and pages."""
from __future__ import annotations

from typing import Optional

import torch

from .pages import Page, PagePool
from .streams import CopyLanes, Lane


def copy_out(t: torch.Tensor, page: Page, lane: Lane) -> None:
    page.dtype, page.shape = t.dtype, tuple(t.shape)
    raw = t.detach().reshape(-1).view(torch.uint8)
    lane.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lane.stream):
        page.data[:raw.numel()].copy_(raw, non_blocking=True)
    lane.record()
    lane.event.synchronize()


def copy_in(page: Page, lane: Lane) -> torch.Tensor:
    out = torch.empty(page.shape, dtype=page.dtype, device="cuda")
    raw = out.view(-1).view(torch.uint8)
    with torch.cuda.stream(lane.stream):
        raw.copy_(page.data[:raw.numel()], non_blocking=True)
    lane.record()
    torch.cuda.current_stream().wait_event(lane.event)
    return out


def snapshot(pages: PagePool, lanes: CopyLanes, t: torch.Tensor) -> Optional[Page]:
    """A page with the content of t, for the caller to put back."""
    page = pages.get_page(t.numel() * t.element_size())  # clean: near miss, put back when no lane is idle, else returned
    if page is None:
        return None
    lane = lanes.enter_idle_lane()  # clean: left after the copy, None-checked
    if lane is None:
        pages.put_page(page)
        return None
    copy_out(t, page, lane)
    lanes.leave_lane(lane)
    return page


def same_after(pages: PagePool, lanes: CopyLanes, t: torch.Tensor, fn) -> Optional[bool]:
    before = snapshot(pages, lanes, t)  # leak: not put back when the second snapshot is missing
    if before is None:
        return None
    fn()
    after = snapshot(pages, lanes, t)  # clean: put back with the first, None-checked
    if after is None:
        return None
    n = t.numel() * t.element_size()
    same = torch.equal(before.data[:n], after.data[:n])
    pages.put_page(before)
    pages.put_page(after)
    return same


def host_max(pages: PagePool, lanes: CopyLanes, t: torch.Tensor) -> float:
    page = snapshot(pages, lanes, t)  # leak: the maximum is read and the page dropped
    if page is None:
        return float(t.max())
    return float(page.data[:t.numel() * t.element_size()].view(t.dtype).max())
