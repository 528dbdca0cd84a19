"""Transfer requests and the board of those in flight."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .regions import RegionPool, RegisteredRegion


@dataclass
class TransferRequest:
    req_id: str
    layers: int
    regions: List[RegisteredRegion] = field(default_factory=list)
    meta: Optional[RegisteredRegion] = None

    def release(self, pool: RegionPool) -> None:
        while self.regions:
            pool.yield_back(self.regions.pop())
        if self.meta is not None:
            pool.yield_back(self.meta)
            self.meta = None


class FlightBoard:
    def __init__(self, pool: RegionPool):
        self.pool = pool
        self._flights: Dict[str, TransferRequest] = {}

    def add(self, req: TransferRequest) -> bool:
        """Takes over the request unless its id is known."""
        if req.req_id in self._flights:
            return False
        self._flights[req.req_id] = req
        return True

    def land(self, req_id: str) -> None:
        req = self._flights.pop(req_id, None)
        if req is not None:
            req.release(self.pool)

    def land_all(self) -> None:
        for req_id in list(self._flights):
            self.land(req_id)
