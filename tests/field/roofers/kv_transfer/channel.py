from __future__ import annotations

from typing import Callable

from .registry import Region

VERSION = 3


class ChannelError(Exception):
    pass


class Channel:
    def __init__(self, fabric: "Fabric", peer: str, version: int) -> None:
        self.fabric = fabric
        self.peer = peer
        self.version = version

    def write(self, region: Region) -> bool:
        return self.fabric.transport(self.peer, region)


class Fabric:
    """Queue pairs to the peers."""

    def __init__(self, transport: Callable[[str, Region], bool], versions: dict[str, int]) -> None:
        self.transport = transport
        self.versions = versions
        self.live = 0

    def connect(self, peer: str) -> Channel:
        if peer not in self.versions:
            raise ChannelError(f"unknown peer {peer}")
        self.live += 1
        return Channel(self, peer, self.versions[peer])

    def disconnect(self, chan: Channel) -> None:
        self.live -= 1
