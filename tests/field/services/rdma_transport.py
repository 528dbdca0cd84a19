"""KV transport over registered memory regions (prefill -> decode)."""
import logging
import struct
from dataclasses import dataclass
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class Region(NamedTuple):
    key: int
    addr: int
    length: int


class RdmaError(RuntimeError):
    pass


class Nic:
    """Registers memory with the adapter. A registered key pins the pages."""

    def __init__(self, max_regions: int) -> None:
        self._max = max_regions
        self._next = 1
        self._regions: Dict[int, Region] = {}

    def register(self, addr: int, length: int) -> int:
        if len(self._regions) >= self._max:
            raise RdmaError("too many memory regions")
        key = self._next
        self._next += 1
        self._regions[key] = Region(key, addr, length)
        return key

    def deregister(self, key: int) -> None:
        del self._regions[key]

    def post_write(self, key: int, remote: Tuple[str, int], nbytes: int) -> int:
        if key not in self._regions:
            raise RdmaError("bad key")
        return nbytes

    def poll(self) -> bool:
        return True


@dataclass
class Peer:
    host: str
    rkey: int
    alive: bool = True


class KvSender:
    def __init__(self, nic: Nic, peers: List[Peer]) -> None:
        self.nic = nic
        self.peers = peers
        self._layer_keys: Dict[str, int] = {}

    def register_layers(self, layers: Dict[str, torch.Tensor]) -> None:
        for name, t in layers.items():
            if name in self._layer_keys:
                continue
            self._layer_keys[name] = self.nic.register(  # clean: kept in the table that shutdown() empties
                t.data_ptr(), t.numel() * t.element_size()
            )

    def shutdown(self) -> None:
        while self._layer_keys:
            _, key = self._layer_keys.popitem()
            self.nic.deregister(key)

    def send_once(self, t: torch.Tensor, peer: Peer) -> int:
        size = t.numel() * t.element_size()
        key = self.nic.register(t.data_ptr(), size)  # leak: a dead peer makes the method raise before deregister
        if not peer.alive:
            raise RdmaError(f"{peer.host} is gone")
        sent = self.nic.post_write(key, (peer.host, peer.rkey), size)
        self.nic.deregister(key)
        return sent

    def send_checked(self, t: torch.Tensor, peer: Peer) -> int:
        if not peer.alive:
            raise RdmaError(f"{peer.host} is gone")
        size = t.numel() * t.element_size()
        key = self.nic.register(t.data_ptr(), size)  # clean: the raise stands before it, finally after
        try:
            sent = self.nic.post_write(key, (peer.host, peer.rkey), size)
            if sent != size:
                raise RdmaError("short write")
        finally:
            self.nic.deregister(key)
        return sent

    def broadcast(self, t: torch.Tensor) -> int:
        total = 0
        size = t.numel() * t.element_size()
        for peer in self.peers:
            key = self.nic.register(t.data_ptr(), size)  # leak: the continue for a dead peer skips deregister
            if not peer.alive:
                logger.warning("skip %s", peer.host)
                continue
            total += self.nic.post_write(key, (peer.host, peer.rkey), size)
            self.nic.deregister(key)
        return total

    def send_with_retry(self, t: torch.Tensor, peer: Peer, attempts: int = 3) -> bool:
        size = t.numel() * t.element_size()
        for attempt in range(attempts):
            key = self.nic.register(t.data_ptr(), size)  # clean: near miss, both outcomes of the attempt deregister
            try:
                self.nic.post_write(key, (peer.host, peer.rkey), size)
            except RdmaError:
                self.nic.deregister(key)
                logger.info("attempt %d failed", attempt)
                continue
            self.nic.deregister(key)
            return True
        return False


def send_best_effort(nic: Nic, tensors: List[torch.Tensor], peer: Peer) -> int:
    ok = 0
    for t in tensors:
        try:
            key = nic.register(t.data_ptr(), t.nbytes)  # leak: a short write is raised, swallowed by the handler, and the key forgotten
            if nic.post_write(key, (peer.host, peer.rkey), t.nbytes) != t.nbytes:
                raise RdmaError("short")
            nic.deregister(key)
            ok += 1
        except RdmaError as exc:
            logger.warning("dropped: %s", exc)
    return ok


def header_for(nic: Nic, t: torch.Tensor) -> Tuple[int, bytes]:
    key = nic.register(t.data_ptr(), t.nbytes)  # clean: key is handed to the caller
    return key, struct.pack("<QQ", key, t.nbytes)


def announce(nic: Nic, t: torch.Tensor, out: List[bytes]) -> None:
    _, header = header_for(nic, t)  # leak: the key is thrown away, only the packed copy is kept
    out.append(header)


def announce_and_wait(nic: Nic, t: torch.Tensor, out: List[bytes]) -> None:
    key, header = header_for(nic, t)  # clean: deregistered once polled
    out.append(header)
    while not nic.poll():
        pass
    nic.deregister(key)


def stream_chunks(nic: Nic, t: torch.Tensor, chunk: int) -> Iterator[int]:
    flat = t.view(-1)
    for off in range(0, flat.numel(), chunk):
        part = flat[off:off + chunk]
        key = nic.register(part.data_ptr(), part.nbytes)  # clean: released after each yield, also when the generator is closed
        try:
            yield key
        finally:
            nic.deregister(key)


def pinned_pair(nic: Nic, k: torch.Tensor, v: torch.Tensor) -> Optional[Tuple[int, int]]:
    kk = nic.register(k.data_ptr(), k.nbytes)  # clean: near miss, rolled back when the second registration fails
    try:
        vk = nic.register(v.data_ptr(), v.nbytes)  # clean: handed to the caller
    except RdmaError:
        nic.deregister(kk)
        return None
    return kk, vk


def exchange(nic: Nic, k: torch.Tensor, v: torch.Tensor, peer: Peer) -> bool:
    pair = pinned_pair(nic, k, v)  # leak: only the key half of the pair is deregistered
    if pair is None:
        return False
    for key, t in zip(pair, (k, v)):
        nic.post_write(key, (peer.host, peer.rkey), t.nbytes)
    nic.deregister(pair[0])
    return True
