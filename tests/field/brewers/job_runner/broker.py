"""Leases groups of devices to jobs."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional, Sequence


class GpuBroker:
    """A lease is a list of device ordinals; unlease takes it whole."""

    def __init__(self, per_node: Dict[str, int]) -> None:
        self._cv = threading.Condition()
        self._nodes: Dict[str, List[int]] = {n: list(range(k)) for n, k in per_node.items()}

    def lease(self, node: str, count: int) -> List[int]:
        """Empty when the node has too few."""
        with self._cv:
            free = self._nodes[node]
            if len(free) < count:
                return []
            got, self._nodes[node] = free[:count], free[count:]
            return got

    def unlease(self, node: str, devices: Sequence[int]) -> None:
        with self._cv:
            self._nodes[node].extend(devices)
            self._cv.notify_all()

    def lease_across(self, want: Dict[str, int]) -> Optional[Dict[str, List[int]]]:
        """All nodes or none."""
        got: Dict[str, List[int]] = {}
        for node, count in want.items():
            devices = self.lease(node, count)  # clean: near miss, on a shortage all nodes so far are unleased
            if not devices:
                for other, held in got.items():
                    self.unlease(other, held)
                return None
            got[node] = devices
        return got

    def lease_any(self, nodes: Sequence[str], count: int, minimum_free: int) -> Optional[str]:
        """Name of a node whose devices were set aside for the caller."""
        for node in nodes:
            devices = self.lease(node, count)  # leak: only the name is returned, nobody has the ordinals to unlease
            if devices and self.idle(node) >= minimum_free:
                return node
        return None

    def idle(self, node: str) -> int:
        with self._cv:
            return len(self._nodes[node])
