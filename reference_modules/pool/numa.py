"""Which memory is near which processor and which GPU, read from sysfs, and how a mapping is put there
(Linux).

Where the machine has one node, or does not say, there is nothing to choose: `Placement.node` is None and
`reason` says why.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SYSFS = Path("/sys")
MBIND = {"x86_64": 237, "aarch64": 235}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
BIND = 2
"""MPOL_BIND: pages come from the given nodes only."""
WHERE_IS_ADDRESS = 1 | 2
"""MPOL_F_NODE | MPOL_F_ADDR."""


@dataclass(frozen=True)
class Node:
    """A part of the machine's memory and the processors beside it."""

    number: int
    processors: frozenset[int]
    total_bytes: int
    distances: tuple[int, ...]
    """To every node, in order of their numbers; 10 is here."""


@dataclass(frozen=True)
class Placement:
    """The node to take memory from, or None with the reason why it is left to the system."""

    node: int | None
    reason: str


def nodes(sysfs: Path = SYSFS) -> list[Node]:
    """The nodes that have memory; empty where the system does not say."""
    root = sysfs / "devices/system/node"
    listed = root / "has_memory"
    if not listed.is_file():
        return []
    return [_node(root / f"node{number}", number) for number in parse_list(listed.read_text())]


def near_gpu(address: str, sysfs: Path = SYSFS) -> Placement:
    """Where memory should lie that the GPU at this PCI address (like 0000:3b:00.0) reads and writes."""
    found = nodes(sysfs)
    if not found:
        return Placement(None, "this system does not list its memory nodes")
    if len(found) == 1:
        return Placement(None, "this machine has one memory node")
    file = sysfs / "bus/pci/devices" / address.lower() / "numa_node"
    if not file.is_file():
        return Placement(None, f"sysfs knows no PCI device {address}")
    number = int(file.read_text())
    if number < 0:
        return Placement(None, f"sysfs does not say which node {address} belongs to")
    with_memory = {node.number: node for node in found}
    if number in with_memory:
        return Placement(number, f"{address} belongs to node {number}")
    nearest = min(found, key=lambda node: node.distances[number] if number < len(node.distances) else 255)
    return Placement(
        nearest.number,
        f"{address} belongs to node {number}, which has no memory; {nearest.number} is nearest",
    )


def gpu_address(index: int) -> str:
    """The PCI address of a CUDA device, as sysfs writes it."""
    properties: Any = torch.cuda.get_device_properties(index)
    domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def bind(address: int, nbytes: int, node: int) -> None:
    """Let pages of this untouched mapping come from the node; OSError where the system refuses."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    _call(MBIND, address, nbytes, BIND, mask, len(mask) * 64 + 1, 0)


def node_of(address: int) -> int:
    """The node that holds the touched page at this address."""
    number = ctypes.c_int(-1)
    _call(GET_MEMPOLICY, ctypes.byref(number), None, 0, address, WHERE_IS_ADDRESS)
    return number.value


def parse_list(text: str) -> list[int]:
    """`0-2,5` as sysfs writes sets of numbers."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def _node(folder: Path, number: int) -> Node:
    total = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
    return Node(
        number,
        frozenset(parse_list((folder / "cpulist").read_text())),
        int(total.group(1)) << 10 if total else 0,
        tuple(int(distance) for distance in (folder / "distance").read_text().split()),
    )


def _call(numbers: dict[str, int], *arguments: object) -> None:
    number = numbers.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise OSError(f"memory cannot be placed on {platform.system()} {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    wide = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(number), *wide) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
