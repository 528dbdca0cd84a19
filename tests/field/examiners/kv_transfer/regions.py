"""Registered memory regions."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

import torch


@dataclass(eq=False)
class RegisteredRegion:
    rkey: int
    tensor: torch.Tensor


class RegionPool:
    def __init__(self, count: int, numel: int):
        self._regions: List[RegisteredRegion] = [
            RegisteredRegion(i, torch.empty(numel, dtype=torch.uint8)) for i in range(count)
        ]

    def claim(self) -> Optional[RegisteredRegion]:
        if not self._regions:
            return None
        return self._regions.pop()  # clean: handed to the caller

    def claim_fitting(self, numel: int) -> Optional[RegisteredRegion]:
        for i in range(len(self._regions)):
            if self._regions[i].tensor.numel() >= numel:
                return self._regions.pop(i)  # clean: near miss, popped only after the size test and returned
        return None

    def claim_at_least(self, numel: int) -> Optional[RegisteredRegion]:
        rejected: List[RegisteredRegion] = []
        found = None
        while self._regions and found is None:
            region = self._regions.pop()  # leak: the rejected ones go back only when a fitting one is found
            if region.tensor.numel() >= numel:
                found = region
            else:
                rejected.append(region)
        if found is None:
            return None
        self._regions.extend(rejected)
        return found

    def yield_back(self, region: RegisteredRegion) -> None:
        self._regions.append(region)
