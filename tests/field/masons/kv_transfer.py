"""Prefill side of KV transfer: staging regions, remote slots and completion."""
from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class TransferError(Exception):
    pass


@dataclass
class Region:
    offset: int
    size: int


class StagingArena:
    """Fixed-size regions of a registered host buffer."""

    def __init__(self, regions: int, size: int) -> None:
        self._free: Deque[Region] = deque(Region(i * size, size) for i in range(regions))

    def lease(self) -> Optional[Region]:
        if not self._free:
            return None
        return self._free.popleft()

    def give_back(self, region: Region) -> None:
        self._free.append(region)


class RemoteSlots:
    """Credits a decode node has granted us."""

    def __init__(self, credits: int) -> None:
        self._credits = credits

    def take_credit(self) -> bool:
        if self._credits == 0:
            return False
        self._credits -= 1
        return True

    def return_credit(self) -> None:
        self._credits += 1


@dataclass
class Transfer:
    request_id: str
    region: Region
    node: str
    done: bool = False
    failed: bool = False


Send = Callable[[str, Region, bytes], bool]


class PrefillSender:
    def __init__(self, arena: StagingArena, nodes: Dict[str, RemoteSlots], send: Send) -> None:
        self.arena = arena
        self.nodes = nodes
        self.send = send
        self.inflight: Dict[str, Transfer] = {}
        self.parked: Deque[Tuple[str, Region]] = deque()
        self.metadata: Dict[str, Region] = {}

    def start(self, request_id: str, node: str, payload: bytes) -> bool:
        slots = self.nodes[node]
        if not slots.take_credit():  # leak: with no region free the credit is not returned
            return False
        region = self.arena.lease()  # clean: near miss, given back when the send fails, else in inflight until poll
        if region is None:
            return False
        try:
            self.send(node, region, payload)
        except TransferError:
            self.arena.give_back(region)
            slots.return_credit()
            return False
        self.inflight[request_id] = Transfer(request_id, region, node)
        return True

    def start_any(self, request_id: str, payload: bytes) -> Optional[str]:
        region = self.arena.lease()  # clean: near miss, given back after the loop when no node took it
        if region is None:
            return None
        for node, slots in self.nodes.items():
            if not slots.take_credit():  # leak: the continue after a refused send keeps the credit
                continue
            if not self.send(node, region, payload):
                logger.info("node %s refused %s", node, request_id)
                continue
            self.inflight[request_id] = Transfer(request_id, region, node)
            return node
        self.arena.give_back(region)
        return None

    def poll(self) -> List[str]:
        finished: List[str] = []
        for request_id, t in list(self.inflight.items()):
            if not (t.done or t.failed):
                continue
            del self.inflight[request_id]
            self.arena.give_back(t.region)
            self.nodes[t.node].return_credit()
            if t.done:
                finished.append(request_id)
        return finished

    def park(self, request_id: str, payload: bytes) -> bool:
        region = self.arena.lease()  # clean: waits in parked, unpark or cancel gives it back
        if region is None:
            return False
        if len(payload) > region.size:
            self.arena.give_back(region)
            return False
        self.parked.append((request_id, region))
        return True

    def unpark(self, node: str) -> int:
        moved = 0
        slots = self.nodes[node]
        while self.parked and slots.take_credit():  # clean: near miss, the failing branch returns it, the other one files it
            request_id, region = self.parked.popleft()
            if not self.send(node, region, b""):
                slots.return_credit()
                self.arena.give_back(region)
                continue
            self.inflight[request_id] = Transfer(request_id, region, node)
            moved += 1
        return moved

    def send_with_retry(self, node: str, payload: bytes, attempts: int = 3) -> bool:
        for attempt in range(attempts):
            region = self.arena.lease()  # leak: each refused attempt leases a new one and drops the old
            if region is None:
                time.sleep(0.01 * attempt)
                continue
            if self.send(node, region, payload):
                self.arena.give_back(region)
                return True
        return False

    def send_once_more(self, node: str, payload: bytes, attempts: int = 3) -> bool:
        region = None
        for attempt in range(attempts):
            if region is None:
                region = self.arena.lease()  # clean: near miss, only leased when none is held, given back after the loop
            if region is None:
                time.sleep(0.01 * attempt)
                continue
            if self.send(node, region, payload):
                break
        ok = region is not None
        if region is not None:
            self.arena.give_back(region)
        return ok

    def publish_metadata(self, node: str, table: bytes) -> bool:
        region = self.arena.lease()  # leak: overwrites the node's former region in metadata
        if region is None:
            return False
        self.metadata[node] = region
        return self.send(node, region, table)

    def retract_metadata(self, node: str) -> None:
        region = self.metadata.pop(node, None)
        if region is not None:
            self.arena.give_back(region)

    def heartbeat(self, node: str) -> bool:
        slots = self.nodes[node]
        if not slots.take_credit():  # clean: finally returns it in each of the ways
            return False
        try:
            return self.send(node, Region(0, 0), b"ping")
        except TransferError:
            return False
        finally:
            slots.return_credit()

    def cancel(self, request_id: str) -> bool:
        t = self.inflight.pop(request_id, None)
        if t is not None:
            self.arena.give_back(t.region)
            self.nodes[t.node].return_credit()
            return True
        for i, (rid, region) in enumerate(self.parked):
            if rid == request_id:
                del self.parked[i]
                self.arena.give_back(region)
                return True
        return False
