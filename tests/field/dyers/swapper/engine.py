from __future__ import annotations

import logging
from collections import deque
from typing import Deque, Dict, List, Optional, Tuple

from .groups import Group, Plan
from .space import BlockSpace, OutOfBlocks, obtain_many

log = logging.getLogger(__name__)


class Swapper:
    def __init__(self, gpu: BlockSpace, cpu: BlockSpace) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.swapped: Deque[Group] = deque()
        self.shared: Dict[str, List[int]] = {}

    def start(self, gid: str, n: int) -> Optional[Group]:
        try:
            blocks = obtain_many(self.gpu, n)  # clean: the group's table, released in end
        except OutOfBlocks:
            return None
        return Group(gid, gpu=blocks)

    def end(self, group: Group) -> None:
        for b in group.gpu:
            self.gpu.release(b)
        for b in group.cpu:
            self.cpu.release(b)
        group.swap_tables([], [])
        group.state = "done"

    def swap_out(self, group: Group) -> Optional[Plan]:
        try:
            host = obtain_many(self.cpu, len(group.gpu))  # clean: becomes the group's host table
        except OutOfBlocks:
            return None
        moves = list(zip(group.gpu, host))
        for b in group.gpu:
            self.gpu.release(b)
        group.swap_tables([], group.cpu + host)
        group.state = "swapped"
        self.swapped.append(group)
        return Plan(moves, group)

    def swap_in(self) -> Optional[Plan]:
        group = self.swapped[0]
        try:
            dev = obtain_many(self.gpu, len(group.cpu))  # clean: near miss, host blocks go back as the tables change
        except OutOfBlocks:
            return None
        self.swapped.popleft()
        moves = list(zip(group.cpu, dev))
        for b in group.cpu:
            self.cpu.release(b)
        group.swap_tables(group.gpu + dev, [])
        group.state = "running"
        return Plan(moves, group)

    def swap_in_partial(self, group: Group, budget: int) -> List[Tuple[int, int]]:
        moves: List[Tuple[int, int]] = []
        dev: List[int] = []
        for b in group.cpu[:budget]:
            try:
                d = self.gpu.obtain()  # leak: shortage is caught and [] returned, blocks in dev are lost
            except OutOfBlocks:
                return []
            dev.append(d)
            moves.append((b, d))
        for b in group.cpu[:budget]:
            self.cpu.release(b)
        group.swap_tables(group.gpu + dev, group.cpu[budget:])
        return moves

    def swap_in_greedy(self, group: Group) -> List[Tuple[int, int]]:
        moves: List[Tuple[int, int]] = []
        while group.cpu:
            try:
                d = self.gpu.obtain()  # clean: near miss, joins the table in the same turn
            except OutOfBlocks:
                break
            b = group.cpu.pop(0)
            group.gpu.append(d)
            moves.append((b, d))
            self.cpu.release(b)
        return moves

    def exchange(self, out: Group, into: Group) -> bool:
        """Swap one group out and another in, in one step."""
        try:
            host = obtain_many(self.cpu, len(out.gpu))  # leak: device shortage is survived, host blocks are not released
            dev = obtain_many(self.gpu, len(into.cpu))  # clean: into's table
        except OutOfBlocks:
            log.info("exchange of %s and %s does not fit", out.gid, into.gid)
            return False
        for b in out.gpu:
            self.gpu.release(b)
        for b in into.cpu:
            self.cpu.release(b)
        out.swap_tables([], out.cpu + host)
        into.swap_tables(into.gpu + dev, [])
        return True

    def publish(self, name: str, group: Group) -> None:
        """Named system prompt: its blocks are shared by later groups."""
        if name in self.shared:
            self.unpublish(name)
        self.shared[name] = [self.gpu.retain(b) for b in group.gpu]  # clean: near miss, name's earlier list is unpublished first

    def unpublish(self, name: str) -> None:
        for b in self.shared.pop(name, []):
            self.gpu.release(b)

    def start_shared(self, gid: str, name: str, extra: int) -> Optional[Group]:
        prefix = [self.gpu.retain(b) for b in self.shared.get(name, [])]  # leak: no room for the tail, None without releasing the prefix
        try:
            tail = obtain_many(self.gpu, extra)  # clean: the group's table
        except OutOfBlocks:
            return None
        return Group(gid, gpu=prefix + tail)

    def snapshot(self, group: Group, depth: int) -> int:
        """Walk the first blocks while they cannot be recycled."""
        n = 0
        for b in group.gpu:
            self.gpu.retain(b)  # leak: break at depth jumps over the release
            if n == depth:
                break
            n += 1
            self.gpu.release(b)
        return n

    def reset_queue(self) -> int:
        n = 0
        while self.swapped:
            self.end(self.swapped.popleft())
            n += 1
        return n
