"""Buffers of the custom all-reduce: registered regions, signal slots and mapped peers."""
from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

log = logging.getLogger("collectives")

ONE_SHOT_LIMIT = 512 * 1024


class SignalPad:
    """Table of synchronisation slots which all ranks see."""

    def __init__(self, slots: int):
        self._used = [False] * slots
        self._cv = threading.Condition()

    def claim(self) -> int:
        with self._cv:
            while all(self._used):
                self._cv.wait()
            slot = self._used.index(False)
            self._used[slot] = True
            return slot

    def vacate(self, slot: int) -> None:
        with self._cv:
            self._used[slot] = False
            self._cv.notify()


@dataclass
class Region:
    key: int
    tensor: torch.Tensor


class RegionRegistry:
    def __init__(self, device: torch.device):
        self.device = device
        self._regions: dict[int, Region] = {}
        self._next = 0

    def register(self, nbytes: int) -> Region:
        region = Region(self._next, torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self._regions[self._next] = region
        self._next += 1
        return region

    def deregister(self, region: Region) -> None:
        self._regions.pop(region.key, None)


class PeerMapper:
    """Opens the memory handles of other ranks; a mapping lives until close_peer."""

    def __init__(self) -> None:
        self._maps: dict[int, bytes] = {}
        self._serial = 0

    def open_peer(self, handle: bytes) -> int | None:
        if not handle:
            return None
        self._serial += 1
        self._maps[self._serial] = handle
        return self._serial

    def close_peer(self, mapping: int) -> None:
        del self._maps[mapping]


class Kernel(Protocol):
    def one_shot(self, src: torch.Tensor, out: torch.Tensor, slot: int) -> None: ...

    def two_shot(self, src: torch.Tensor, out: torch.Tensor, slots: tuple[int, int]) -> None: ...


class CustomAllreduce:
    def __init__(self, pad: SignalPad, registry: RegionRegistry, kernel: Kernel, nbytes: int):
        self.pad, self.registry, self.kernel = pad, registry, kernel
        self.barrier_slot = pad.claim()  # leak: close deregisters the region and leaves the slot used
        self.region = registry.register(nbytes)  # clean: deregistered in close
        self.closed = False

    def should_custom(self, inp: torch.Tensor) -> bool:
        return inp.is_contiguous() and inp.nbytes <= self.region.tensor.numel()

    def all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        slot = self.pad.claim()  # leak: the fallback to the process group keeps the slot
        if not self.should_custom(inp):
            dist.all_reduce(inp)
            return inp
        out = torch.empty_like(inp)
        self.kernel.one_shot(inp, out, slot)
        self.pad.vacate(slot)
        return out

    def all_reduce_large(self, inp: torch.Tensor) -> torch.Tensor:
        if inp.nbytes <= ONE_SHOT_LIMIT:
            return self.all_reduce(inp)
        first = self.pad.claim()  # clean: vacated in the finally
        second = self.pad.claim()  # clean: vacated in the finally
        try:
            out = torch.empty_like(inp)
            self.kernel.two_shot(inp, out, (first, second))
            return out
        finally:
            self.pad.vacate(first)
            self.pad.vacate(second)

    def close(self) -> None:
        if self.closed:
            return
        self.registry.deregister(self.region)
        self.closed = True


class QuantAllreduce:
    """Reduces in low precision. The scale region may be shared with another communicator."""

    def __init__(self, registry: RegionRegistry, pad: SignalPad, nbytes: int, scales: Region | None = None):
        self.registry, self.pad = registry, pad
        self.owns_scales = scales is None
        self.scales = scales if scales is not None else registry.register(nbytes // 64)  # clean: near miss, deregistered in close if owned
        self.slot = pad.claim()  # clean: vacated in close

    def reduce(self, inp: torch.Tensor) -> torch.Tensor:
        scale = inp.abs().amax() / 448.0
        self.scales.tensor[:4].copy_(scale.float().view(torch.uint8))
        packed = (inp / scale).to(torch.float8_e4m3fn)
        dist.all_reduce(packed)
        return packed.to(inp.dtype) * scale

    def close(self) -> None:
        self.pad.vacate(self.slot)
        if self.owns_scales:
            self.registry.deregister(self.scales)


class GatherBuffer:
    def __init__(self, registry: RegionRegistry, nbytes: int, region: Region | None = None):
        self.registry = registry
        self.external = True
        if region is None:
            region = registry.register(nbytes)  # leak: external stays true, so close never deregisters it
        self.region = region

    def gather(self, parts: list[torch.Tensor]) -> torch.Tensor:
        at = 0
        for part in parts:
            flat = part.view(torch.uint8).flatten()
            self.region.tensor[at:at + flat.numel()].copy_(flat)
            at += flat.numel()
        return self.region.tensor[:at].clone()

    def close(self) -> None:
        if not self.external:
            self.registry.deregister(self.region)


def map_world(mapper: PeerMapper, handles: list[bytes], rank: int) -> list[int] | None:
    """Mappings of all other ranks, or None if one of them cannot be mapped."""
    mappings: list[int] = []
    for peer, handle in enumerate(handles):
        if peer == rank:
            continue
        mapping = mapper.open_peer(handle)  # leak: those of the former ranks stay open when one fails
        if mapping is None:
            log.warning("rank %d has no handle", peer)
            return None
        mappings.append(mapping)
    return mappings


def map_world_checked(mapper: PeerMapper, handles: list[bytes], rank: int) -> list[int] | None:
    mappings: list[int] = []
    for peer, handle in enumerate(handles):
        if peer == rank:
            continue
        mapping = mapper.open_peer(handle)  # clean: rolled back when one fails, else returned
        if mapping is None:
            while mappings:
                mapper.close_peer(mappings.pop())
            return None
        mappings.append(mapping)
    return mappings


@dataclass
class PeerSession:
    rank: int
    mapping: int
    slot: int


@dataclass
class SessionTable:
    mapper: PeerMapper
    pad: SignalPad
    sessions: dict[int, PeerSession] = field(default_factory=dict)

    def join(self, rank: int, handle: bytes) -> bool:
        if rank in self.sessions:
            return True
        mapping = self.mapper.open_peer(handle)  # clean: kept in the table, closed by leave
        if mapping is None:
            return False
        slot = self.pad.claim()  # clean: near miss, kept in the table, vacated by leave
        self.sessions[rank] = PeerSession(rank, mapping, slot)
        return True

    def leave(self, rank: int) -> None:
        session = self.sessions.pop(rank, None)
        if session is None:
            return
        self.mapper.close_peer(session.mapping)
        self.pad.vacate(session.slot)

    def resize(self, world: int) -> None:
        for rank in [r for r in self.sessions if r >= world]:
            self.leave(rank)

    def shutdown(self) -> None:
        self.resize(0)


def staged_copy(registry: RegionRegistry, src: torch.Tensor) -> Region:
    region = registry.register(src.nbytes)  # clean: the region is returned
    region.tensor.copy_(src.view(torch.uint8).flatten())
    return region


def broadcast_config(registry: RegionRegistry, blob: torch.Tensor, root: int) -> torch.Tensor:
    region = staged_copy(registry, blob)  # leak: a clone is returned and the region dropped
    dist.broadcast(region.tensor, src=root)
    return region.tensor.clone()


def grow_region(registry: RegionRegistry, region: Region, nbytes: int) -> Region:
    """Takes over the old region and gives back one that is large enough."""
    if region.tensor.numel() >= nbytes:
        return region
    bigger = registry.register(nbytes)  # clean: near miss, returned in place of the old one
    bigger.tensor[: region.tensor.numel()].copy_(region.tensor)
    registry.deregister(region)
    return bigger


def tune_one_shot(registry: RegionRegistry, kernel: Kernel, pad: SignalPad, sizes: list[int]) -> int:
    """Largest size for which one-shot is still quicker, by the environment's limit."""
    limit = int(os.environ.get("ONE_SHOT_MAX", ONE_SHOT_LIMIT))
    best = 0
    region = registry.register(min(sizes))  # leak: a larger region is bound over it in the loop
    for size in sorted(sizes):
        if size > limit:
            break
        if size > region.tensor.numel():
            region = registry.register(size)  # leak: overwritten by the next larger one
        slot = pad.claim()  # clean: vacated at the end of the turn
        kernel.one_shot(region.tensor[:size], torch.empty_like(region.tensor[:size]), slot)
        pad.vacate(slot)
        best = size
    registry.deregister(region)
    return best
