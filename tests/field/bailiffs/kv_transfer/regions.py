"""Registered memory regions and completion queue entries."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    rkey: int
    length: int


class RegionTable:
    """Memory registration is limited by the device; each registration must be undone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live: dict[int, Region] = {}
        self._next = 1

    def register(self, length: int) -> Region | None:
        if len(self._live) >= self._limit:
            return None
        region = Region(self._next, length)
        self._next += 1
        self._live[region.rkey] = region
        return region

    def deregister(self, region: Region) -> None:
        self._live.pop(region.rkey)


class Credits:
    """Send credits granted by the peer."""

    def __init__(self, total: int) -> None:
        self.left = total

    def consume(self, n: int = 1) -> bool:
        if self.left < n:
            return False
        self.left -= n
        return True

    def replenish(self, n: int = 1) -> None:
        self.left += n


@dataclass
class LayerRegions:
    """Key and value region of one layer."""

    keys: Region
    values: Region


def register_layer(table: RegionTable, length: int) -> LayerRegions | None:
    keys = table.register(length)  # clean: deregistered on refusal, else part of the result
    if keys is None:
        return None
    values = table.register(length)  # clean: part of the result
    if values is None:
        table.deregister(keys)
        return None
    return LayerRegions(keys, values)


def deregister_keys(table: RegionTable, layer: LayerRegions) -> None:
    table.deregister(layer.keys)


def deregister_layer(table: RegionTable, layer: LayerRegions) -> None:
    table.deregister(layer.values)
    deregister_keys(table, layer)
