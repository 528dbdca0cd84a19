"""Both ends of a transfer."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch

from .regions import RegionPool, RegisteredRegion
from .requests import FlightBoard, TransferRequest


class PrefillSide:
    def __init__(self, pool: RegionPool):
        self.pool = pool
        self.board = FlightBoard(pool)

    def launch(self, req_id: str, pages: List[torch.Tensor]) -> bool:
        req = TransferRequest(req_id, len(pages))
        for page in pages:
            region = self.pool.claim_fitting(page.numel())  # clean: near miss, release on both failures, else the board lands it
            if region is None:
                req.release(self.pool)
                return False
            region.tensor[: page.numel()].copy_(page.reshape(-1))
            req.regions.append(region)
        if not self.board.add(req):
            req.release(self.pool)
            return False
        return True

    def launch_single(self, req_id: str, page: torch.Tensor) -> bool:
        req = TransferRequest(req_id, 1)
        region = self.pool.claim_fitting(page.numel())  # leak: the board refuses a known id and the request is dropped
        if region is None:
            return False
        region.tensor[: page.numel()].copy_(page.reshape(-1))
        req.regions.append(region)
        return self.board.add(req)

    def launch_with_meta(self, req_id: str, page: torch.Tensor, head: torch.Tensor) -> bool:
        req = TransferRequest(req_id, 1)
        req.meta = self.pool.claim()  # leak: not released when there is no region for the page
        if req.meta is None:
            return False
        req.meta.tensor[: head.numel()].copy_(head.reshape(-1))
        region = self.pool.claim_fitting(page.numel())  # clean: near miss, in the request, which is released if refused
        if region is None:
            return False
        req.regions.append(region)
        if not self.board.add(req):
            req.release(self.pool)
            return False
        return True

    def done(self, req_id: str) -> None:
        self.board.land(req_id)


class DecodeSide:
    def __init__(self, pool: RegionPool):
        self.pool = pool
        self.slots: Dict[int, RegisteredRegion] = {}

    def _fetch(self, page: torch.Tensor) -> Optional[RegisteredRegion]:
        region = self.pool.claim()  # clean: near miss, a region that is too small goes back, else the caller's
        if region is None:
            return None
        if region.tensor.numel() < page.numel():
            self.pool.yield_back(region)
            return None
        region.tensor[: page.numel()].copy_(page.reshape(-1))
        return region

    def receive(self, layer: int, page: torch.Tensor) -> bool:
        region = self._fetch(page)  # clean: near miss, the former region of the layer goes back
        if region is None:
            return False
        old = self.slots.get(layer)
        self.slots[layer] = region
        if old is not None:
            self.pool.yield_back(old)
        return True

    def receive_again(self, layer: int, page: torch.Tensor) -> bool:
        region = self._fetch(page)  # leak: overwrites the layer's former region, whose handle is kept nowhere
        if region is None:
            return False
        self.slots[layer] = region
        return True

    def read_page(self, page: torch.Tensor) -> Optional[torch.Tensor]:
        region = self._fetch(page)  # leak: a clone is returned and the region dropped
        if region is None:
            return None
        return region.tensor[: page.numel()].clone()

    def read_page_into(self, page: torch.Tensor, out: torch.Tensor) -> bool:
        region = self._fetch(page)  # clean: given back after the copy
        if region is None:
            return False
        out.copy_(region.tensor[: page.numel()].view_as(out))
        self.pool.yield_back(region)
        return True

    def clear(self) -> None:
        while self.slots:
            _, region = self.slots.popitem()
            self.pool.yield_back(region)
