"""Process groups of experts, by reference."""
from __future__ import annotations

import threading

import torch.distributed as dist


class ExpertGroups:
    def __init__(self):
        self._groups: dict[tuple[int, ...], object] = {}
        self._refs: dict[tuple[int, ...], int] = {}
        self._lock = threading.RLock()

    def join(self, ranks: tuple[int, ...]):
        with self._lock:
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks))
                self._refs[ranks] = 0
            self._refs[ranks] += 1
            return self._groups[ranks]

    def leave(self, ranks: tuple[int, ...]) -> None:
        with self._lock:
            self._refs[ranks] -= 1
            if self._refs[ranks] == 0:
                dist.destroy_process_group(self._groups.pop(ranks))
                del self._refs[ranks]


class Placement:
    """Where the experts are; moves hold the new group before the old is left."""

    def __init__(self, groups: ExpertGroups, ranks: tuple[int, ...]):
        self.groups = groups
        self.ranks = ranks
        self.group = groups.join(ranks)  # clean: left in close() or by move()

    def move(self, ranks: tuple[int, ...]) -> None:
        fresh = self.groups.join(ranks)  # clean: near miss, the old ranks are left and the new ones kept, also when equal
        self.groups.leave(self.ranks)
        self.ranks, self.group = ranks, fresh

    def preview(self, ranks: tuple[int, ...]) -> bool:
        group = self.groups.join(ranks)  # leak: not left when the group has the size of the present one
        if dist.get_world_size(group) == dist.get_world_size(self.group):
            return True
        self.groups.leave(ranks)
        return False

    def close(self) -> None:
        self.groups.leave(self.ranks)
