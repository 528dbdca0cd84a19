"""Swapping of KV pages between GPU and host when a request is preempted."""
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

import torch


class Where(Enum):
    GPU = "gpu"
    HOST = "host"


@dataclass
class PageSet:
    """Number of pages in one place."""

    where: Where
    pages: list[int]

    def __len__(self) -> int:
        return len(self.pages)


@dataclass
class Victim:
    rid: int
    device: Optional[PageSet] = None
    host: Optional[PageSet] = None
    pending: list[PageSet] = field(default_factory=list)


class PageSpace:
    """A stack of page numbers; slices come off the end."""

    def __init__(self, where: Where, count: int) -> None:
        self.where = where
        self._stack = list(range(count))

    def room(self) -> int:
        return len(self._stack)

    def carve(self, count: int) -> Optional[PageSet]:
        if count > len(self._stack):
            return None
        if count == 0:
            return PageSet(self.where, [])
        pages = self._stack[-count:]
        del self._stack[-count:]  # clean: the slice is returned
        return PageSet(self.where, pages)

    def carve_contiguous(self, count: int) -> Optional[PageSet]:
        self._stack.sort()
        pages = [self._stack.pop() for _ in range(min(count, len(self._stack)))]  # leak: a gap returns None with the popped pages gone
        if len(pages) < count or pages[0] - pages[-1] != count - 1:
            return None
        return PageSet(self.where, pages[::-1])

    def absorb(self, ps: PageSet) -> None:
        self._stack.extend(ps.pages)
        ps.pages = []


class Swapper:
    def __init__(self, gpu: PageSpace, host: PageSpace, gpu_kv: torch.Tensor, host_kv: torch.Tensor) -> None:
        self.gpu = gpu
        self.host = host
        self.gpu_kv = gpu_kv
        self.host_kv = host_kv
        self.out: dict[int, Victim] = {}

    def admit(self, v: Victim, pages: int) -> bool:
        if v.device is not None:
            return True
        v.device = self.gpu.carve(pages)  # clean: the victim's until drop or swap_out
        return v.device is not None

    def swap_out(self, v: Victim) -> bool:
        if v.device is None or v.host is not None:
            return False
        target = self.host.carve(len(v.device))  # clean: near miss, moved to v.host before the device pages are absorbed
        if target is None:
            return False
        self.host_kv[target.pages] = self.gpu_kv[v.device.pages].cpu()
        v.host = target
        self.gpu.absorb(v.device)
        v.device = None
        self.out[v.rid] = v
        return True

    def swap_in(self, rid: int, limit: int) -> bool:
        v = self.out[rid]
        if v.host is None or v.device is not None:
            return False
        dest = self.gpu.carve(len(v.host))  # leak: above the limit it is refused after carving
        if dest is None:
            return False
        if len(dest) > limit:
            return False
        self.gpu_kv[dest.pages] = self.host_kv[v.host.pages].to(self.gpu_kv.device)
        v.device = dest
        self.host.absorb(v.host)
        v.host = None
        del self.out[rid]
        return True

    def swap_out_many(self, victims: list[Victim], needed: int) -> int:
        freed = 0
        for v in victims:
            if v.device is None or v.host is not None:
                continue
            target = self.host.carve(len(v.device))  # clean: near miss, pages of a small victim are absorbed before the continue
            if target is None:
                break
            if len(target) < 4:
                self.host.absorb(target)
                continue
            self.host_kv[target.pages] = self.gpu_kv[v.device.pages].cpu()
            freed += len(v.device)
            self.gpu.absorb(v.device)
            v.device, v.host = None, target
            self.out[v.rid] = v
            if freed >= needed:
                break
        return freed

    def prefetch(self, rid: int, count: int) -> bool:
        v = self.out.get(rid)
        if v is None:
            return False
        ps = self.gpu.carve(count)  # clean: appended to pending, drop absorbs them
        if ps is None:
            return False
        v.pending.append(ps)
        return True

    def prefetch_first(self, rid: int, count: int) -> bool:
        v = self.out.get(rid)
        ps = self.gpu.carve(count)  # leak: carved before the victim is known to be there
        if v is None:
            return False
        if ps is None:
            return False
        v.pending.insert(0, ps)
        return True

    def drop(self, v: Victim) -> None:
        self.out.pop(v.rid, None)
        if v.device is not None:
            self.gpu.absorb(v.device)
        if v.host is not None:
            self.host.absorb(v.host)
        for ps in v.pending:
            self.gpu.absorb(ps)
        v.pending.clear()
        v.device = v.host = None


def bandwidth_test(sw: Swapper, count: int) -> Optional[float]:
    src = sw.gpu.carve(count)  # leak: stays carved when the host has no room
    dst = sw.host.carve(count)  # clean: absorbed with the source
    if src is None:
        if dst is not None:
            sw.host.absorb(dst)
        return None
    if dst is None:
        return None
    sw.host_kv[dst.pages] = sw.gpu_kv[src.pages].cpu()
    total = float(sw.host_kv[dst.pages].sum())
    sw.host.absorb(dst)
    sw.gpu.absorb(src)
    return total


def largest_run(space: PageSpace, upper: int) -> int:
    while upper > 0:
        ps = space.carve(upper)  # clean: near miss, absorb empties it but the length was saved
        if ps is not None:
            n = len(ps)
            space.absorb(ps)
            return n
        upper //= 2
    return 0
