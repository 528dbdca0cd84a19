"""Write-back and load-back between the tiers."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from .pools import PagePool


@dataclass
class Movement:
    node_id: int
    device_pages: torch.Tensor
    host_pages: torch.Tensor


class TierController:
    def __init__(self, device: PagePool, host: PagePool):
        self.device = device
        self.host = host
        self.writes: deque[Movement] = deque()
        self.loads: deque[Movement] = deque()
        self.host_of: dict[int, torch.Tensor] = {}

    def write(self, node_id: int, device_pages: torch.Tensor) -> bool:
        if node_id in self.host_of:
            return False
        host_pages = self.host.carve(len(device_pages))  # clean: near miss, filed under the node at once, forget() refills
        if host_pages is None:
            return False
        self.writes.append(Movement(node_id, device_pages, host_pages))
        self.host_of[node_id] = host_pages
        return True

    def commit_writes(self) -> int:
        n = 0
        while self.writes:
            mv = self.writes.popleft()
            self.host.store[mv.host_pages] = self.device.store[mv.device_pages]
            n += 1
        return n

    def write_selective(self, node_id: int, device_pages: torch.Tensor, hits: int) -> bool:
        host_pages = self.host.carve(len(device_pages))  # leak: cold nodes are turned away with the host pages carved
        if host_pages is None:
            return False
        if hits < 2 or node_id in self.host_of:
            return False
        self.host.store[host_pages] = self.device.store[device_pages]
        self.host_of[node_id] = host_pages
        return True

    def forget(self, node_id: int) -> None:
        pages = self.host_of.pop(node_id, None)
        if pages is not None:
            self.host.refill(pages)

    def load(self, node_id: int) -> torch.Tensor | None:
        """Copy a node back; the caller owns the device pages."""
        host_pages = self.host_of.get(node_id)
        if host_pages is None:
            return None
        pages = self.device.carve(len(host_pages))  # clean: the caller owns them
        if pages is None:
            return None
        self.device.store[pages] = self.host.store[host_pages]
        return pages

    def load_chain(self, node_ids: list[int]) -> torch.Tensor | None:
        """All nodes of a path or None; the caller owns the pages."""
        parts: list[torch.Tensor] = []
        for nid in node_ids:
            pages = self.load(nid)  # clean: near miss, parts are refilled on a miss and concatenated otherwise
            if pages is None:
                if parts:
                    self.device.refill(torch.cat(parts))
                return None
            parts.append(pages)
        return torch.cat(parts) if parts else None

    def rehearse_move(self, node_id: int, fresh: PagePool) -> bool:
        """Copy a node's host pages into another pool by way of the device and compare."""
        host_pages = self.host_of.get(node_id)
        if host_pages is None:
            return False
        bounce = self.device.carve(len(host_pages))  # leak: without room in `fresh` the bounce pages are not refilled
        if bounce is None:
            return False
        target = fresh.carve(len(host_pages))  # clean: refilled after the comparison
        if target is None:
            return False
        self.device.store[bounce] = self.host.store[host_pages]
        fresh.store[target] = self.device.store[bounce]
        self.device.refill(bounce)
        ok = bool((fresh.store[target] == self.host.store[host_pages]).all())
        fresh.refill(target)
        return ok
