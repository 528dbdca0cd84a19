"""Memory regions for the transfer engine."""
import logging
import threading
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Tuple

import torch

logger = logging.getLogger("xfer.mr")


class RegistrationError(Exception):
    pass


class MemoryRegistrar:
    """Maps (address, length) to a region key."""

    def __init__(self, limit: int = 1024):
        self._limit = limit
        self._next = 1
        self._regions: Dict[int, Tuple[int, int]] = {}

    def register(self, tensor: torch.Tensor) -> int:
        if len(self._regions) >= self._limit:
            raise RegistrationError("region table full")
        key = self._next
        self._next += 1
        self._regions[key] = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return key

    def deregister(self, key: int) -> None:
        del self._regions[key]


class TransferEngine:
    def __init__(self, registrar: MemoryRegistrar, link):
        self.registrar = registrar
        self.link = link
        self._lock = threading.Lock()
        self._layer_keys: List[int] = []
        self._scratch_key: Optional[int] = None

    def register_kv_caches(self, caches: Dict[str, torch.Tensor]) -> None:
        for name, cache in caches.items():
            if cache.numel() == 0:
                continue
            self._layer_keys.append(self.registrar.register(cache))  # clean: shutdown deregisters all layer keys
            logger.debug("registered %s", name)

    def set_scratch(self, tensor: torch.Tensor) -> None:
        if self._scratch_key is not None:
            self.registrar.deregister(self._scratch_key)
        self._scratch_key = self.registrar.register(tensor)  # clean: near miss, the previous key goes first, shutdown takes the last

    def write(self, peer: str, tensor: torch.Tensor) -> bool:
        key = self.registrar.register(tensor)  # leak: a peer that does not answer the handshake returns with the region registered
        if not self.link.handshake(peer):
            logger.error("peer %s did not answer", peer)
            return False
        self.link.post_write(peer, key)
        self.link.poll()
        self.registrar.deregister(key)
        return True

    def read_into(self, peer: str, tensor: torch.Tensor, remote: int) -> int:
        key = self.registrar.register(tensor)  # clean: finally
        try:
            n = self.link.post_read(peer, key, remote)
            if n == 0:
                return 0
            self.link.poll()
            return n
        finally:
            self.registrar.deregister(key)

    def exchange(self, peer: str, send: torch.Tensor, recv: torch.Tensor) -> bool:
        skey = self.registrar.register(send)  # leak: when the second region fails the handler returns without this one
        try:
            rkey = self.registrar.register(recv)  # clean: deregistered at the end
        except RegistrationError:
            return False
        self.link.post_pair(peer, skey, rkey)
        self.link.poll()
        self.registrar.deregister(rkey)
        self.registrar.deregister(skey)
        return True

    def exchange_pair(self, peer: str, send: torch.Tensor, recv: torch.Tensor) -> bool:
        skey = self.registrar.register(send)  # clean: near miss, the handler rolls it back
        try:
            rkey = self.registrar.register(recv)  # clean: deregistered at the end
        except RegistrationError:
            self.registrar.deregister(skey)
            return False
        self.link.post_pair(peer, skey, rkey)
        self.link.poll()
        for key in (skey, rkey):
            self.registrar.deregister(key)
        return True

    @contextmanager
    def temporary(self, tensor: torch.Tensor) -> Iterator[int]:
        key = self.registrar.register(tensor)  # clean: finally of the context manager
        try:
            yield key
        finally:
            self.registrar.deregister(key)

    def scatter(self, peers: List[str], tensor: torch.Tensor) -> int:
        sent = 0
        with self.temporary(tensor) as key:  # clean: near miss, return and continue leave through the with
            for peer in peers:
                if not self.link.handshake(peer):
                    continue
                if self.link.post_write(peer, key) < 0:
                    return sent
                sent += 1
        return sent

    def descriptor_size(self, tensor: torch.Tensor) -> int:
        with self._lock:
            return len(self.link.encode(self.registrar.register(tensor)))  # leak: the key is a temporary and stays registered

    def shutdown(self) -> None:
        for key in self._layer_keys:
            self.registrar.deregister(key)
        self._layer_keys.clear()
        if self._scratch_key is not None:
            self.registrar.deregister(self._scratch_key)
            self._scratch_key = None
