from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable

from .regions import Misaligned, PinLimit, Region, RegionTable

HEADER_BYTES = 4096


class UnknownRank(KeyError):
    pass


@dataclass
class Transfer:
    name: str
    region: Region
    rank: int
    remote: int


@dataclass
class TransferPlan:
    table: RegionTable
    transfers: list[Transfer] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    header: Region | None = None

    def attach_header(self, addr: int) -> None:
        self.header = self.table.register(addr, HEADER_BYTES)  # leak: close() deregisters the regions but forgets the header

    def add(self, name: str, param, placements: dict[int, int]) -> None:
        region = self.table.register(param.data_ptr(), param.nbytes)  # clean: near miss, it is in the plan before anything can fail and close() deregisters it
        self.regions.append(region)
        for rank, remote in placements.items():
            self.transfers.append(Transfer(name, region, rank, remote))

    def close(self) -> None:
        while self.regions:
            self.table.deregister(self.regions.pop())
        self.transfers.clear()


def build_plan(table: RegionTable, params: Iterable, layout: dict[str, dict[int, int]]) -> TransferPlan:
    plan = TransferPlan(table)
    try:
        for name, param in params:
            plan.add(name, param, layout[name])
    except (PinLimit, KeyError):
        plan.close()
        raise
    return plan


def register_experts(table: RegionTable, experts, owners: dict[int, int]) -> list[Transfer]:
    """Expert weights lie with a pitch; each goes to the rank that owns it."""
    out = []
    for i, w in enumerate(experts):
        region = table.register_strided(w.data_ptr(), w.shape[0], w.stride(0) * w.element_size())  # leak: UnknownRank is raised with this region and all earlier ones registered
        if i not in owners:
            raise UnknownRank(i)
        out.append(Transfer(f"experts.{i}", region, owners[i], 0))
    return out


def probe_layout(table: RegionTable, param) -> bool:
    """Whether the NIC accepts the strides of this parameter."""
    try:
        region = table.register_strided(param.data_ptr(), param.shape[0], param.stride(0))  # clean: deregistered below
    except Misaligned:
        return False
    table.deregister(region)
    return True
