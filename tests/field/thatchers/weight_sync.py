"""Trainer -> rollout weight synchronisation over registered memory regions."""
from __future__ import annotations

import itertools
import logging
import threading
from typing import Dict, Iterator, Mapping, Optional, Sequence, Tuple

import torch

log = logging.getLogger("wsync")


class Region:
    def __init__(self, rkey: int, tensor: torch.Tensor) -> None:
        self.rkey = rkey
        self.tensor = tensor


class Nic:
    """Registered regions and send channels of one adapter."""

    def __init__(self, max_regions: int, channels: int) -> None:
        self.max_regions = max_regions
        self.regions: Dict[int, Region] = {}
        self._keys = itertools.count(1)
        self._channels = list(range(channels))
        self._lock = threading.Lock()

    def register(self, tensor: torch.Tensor) -> Optional[Region]:
        with self._lock:
            if len(self.regions) >= self.max_regions:
                return None
            region = Region(next(self._keys), tensor)
            self.regions[region.rkey] = region
            return region

    def deregister(self, region: Region) -> None:
        with self._lock:
            self.regions.pop(region.rkey, None)

    def open_channel(self) -> Optional[int]:
        with self._lock:
            if not self._channels:
                return None
            return self._channels.pop()

    def close_channel(self, ch: int) -> None:
        with self._lock:
            self._channels.append(ch)

    def push(self, ch: int, region: Region, peer: str) -> bool:
        log.debug("push rkey=%d via %d to %s", region.rkey, ch, peer)
        return region.tensor.numel() > 0


class Lane:
    """A channel together with the region it sends from."""

    def __init__(self, nic: Nic, channel: int, region: Region, owned: bool = True) -> None:
        self.nic = nic
        self.channel = channel
        self.region = region
        self.owned = owned

    def send(self, peer: str) -> bool:
        return self.nic.push(self.channel, self.region, peer)

    def close(self) -> None:
        self.nic.close_channel(self.channel)
        if self.owned:
            self.nic.deregister(self.region)


def open_lane(nic: Nic, tensor: torch.Tensor) -> Optional[Lane]:
    region = nic.register(tensor)  # clean: near miss, deregistered when no channel is free, otherwise the lane owns it
    if region is None:
        return None
    ch = nic.open_channel()  # clean: the lane closes it
    if ch is None:
        nic.deregister(region)
        return None
    return Lane(nic, ch, region)


def lane_for_region(nic: Nic, region: Region) -> Optional[Lane]:
    ch = nic.open_channel()  # clean: near miss, the lane closes it, the region stays with the caller
    if ch is None:
        return None
    return Lane(nic, ch, region, owned=False)


def lane_for_copy(nic: Nic, tensor: torch.Tensor) -> Optional[Lane]:
    ch = nic.open_channel()  # clean: near miss, closed again when the copy cannot be registered
    if ch is None:
        return None
    region = nic.register(tensor.clone())  # leak: the lane is made as not owned, so close() never deregisters the copy
    if region is None:
        nic.close_channel(ch)
        return None
    return Lane(nic, ch, region, owned=False)


class WeightSync:
    def __init__(self, nic: Nic, peers: Sequence[str]) -> None:
        self.nic = nic
        self.peers = list(peers)
        self.static: Dict[str, Region] = {}
        self.lanes: Dict[str, Lane] = {}
        self.version = 0

    def register_params(self, params: Mapping[str, torch.Tensor]) -> int:
        for name, p in params.items():
            if name in self.static:
                continue
            region = self.nic.register(p)  # clean: near miss, kept in the static table, close() deregisters
            if region is None:
                break
            self.static[name] = region
        return len(self.static)

    def swap_param(self, name: str, p: torch.Tensor) -> bool:
        region = self.nic.register(p)  # clean: near miss, setdefault decides and the loser is deregistered
        if region is None:
            return False
        kept = self.static.setdefault(name, region)
        if kept is not region:
            self.static[name] = region
            self.nic.deregister(kept)
        return True

    def push_all(self) -> int:
        sent = 0
        for name, region in self.static.items():
            lane = lane_for_region(self.nic, region)  # leak: the first refused push breaks out with the lane open
            if lane is None:
                continue
            if not all(lane.send(peer) for peer in self.peers):
                log.warning("push of %s refused", name)
                break
            lane.close()
            sent += 1
        self.version += 1
        return sent

    def push_buckets(self, buckets: Sequence[torch.Tensor]) -> bool:
        ok = True
        for b in buckets:
            lane = open_lane(self.nic, b)  # clean: near miss, closed before the refusal breaks the loop
            if lane is None:
                return False
            ok = all(lane.send(peer) for peer in self.peers)
            lane.close()
            if not ok:
                break
        return ok

    def connect(self, peer: str, tensor: torch.Tensor) -> bool:
        lane = open_lane(self.nic, tensor)  # leak: remove_peer() deletes the entry and leaves the lane open
        if lane is None:
            return False
        old = self.lanes.pop(peer, None)
        if old is not None:
            old.close()
        self.lanes[peer] = lane
        return True

    def remove_peer(self, peer: str) -> None:
        self.peers.remove(peer)
        self.lanes.pop(peer, None)

    def push_once(self, tensor: torch.Tensor, peer: str) -> bool:
        lane = lane_for_copy(self.nic, tensor)  # clean: closed after the send
        if lane is None:
            return False
        ok = lane.send(peer)
        lane.close()
        return ok

    def delta(self, base: torch.Tensor, new: torch.Tensor, peer: str) -> Tuple[bool, int]:
        diff = new - base
        region = self.nic.register(diff)  # leak: with no lane for it the tuple is returned and the region stays registered
        if region is None:
            return False, 0
        lane = lane_for_region(self.nic, region)  # clean: closed after the send
        if lane is None:
            return False, self.version
        ok = lane.send(peer)
        lane.close()
        self.nic.deregister(region)
        return ok, self.version

    def iter_lanes(self, tensors: Sequence[torch.Tensor]) -> Iterator[Lane]:
        for t in tensors:
            lane = open_lane(self.nic, t)  # leak: not closed when the consumer stops early, as first_accepting() does
            if lane is None:
                return
            yield lane
            lane.close()

    def first_accepting(self, tensors: Sequence[torch.Tensor], peer: str) -> int:
        for i, lane in enumerate(self.iter_lanes(tensors)):
            if lane.send(peer):
                return i
        return -1

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.lanes.clear()
        for region in self.static.values():
            self.nic.deregister(region)
        self.static.clear()
