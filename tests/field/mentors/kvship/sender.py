from __future__ import annotations

import logging
from typing import Mapping, Sequence

from .buffers import Lease, SlabPool
from .channel import Channel, ChannelClosed, Frame

logger = logging.getLogger(__name__)


class Sender:
    def __init__(self, pool: SlabPool, channel: Channel) -> None:
        self.pool = pool
        self.channel = channel
        self.retained: dict[str, Lease] = {}

    def _pack(self, data: bytes) -> Lease | None:
        if len(data) > self.pool.nbytes:
            return None
        lease = self.pool.open_lease()  # clean: the caller's
        if lease is None:
            return None
        lease.slab[: len(data)] = data
        lease.used = len(data)
        return lease

    def send(self, key: str, data: bytes) -> bool:
        if not self.channel.take_credit():  # leak: not returned when the data cannot be packed
            return False
        lease = self._pack(data)  # clean: near miss, closed when the channel is closed, else the receiver's
        if lease is None:
            return False
        try:
            self.channel.push(Frame(key, lease, last=True))
        except ChannelClosed:
            self.pool.close_lease(lease)
            self.channel.return_credit()
            return False
        return True

    def send_layers(self, key: str, layers: Sequence[bytes]) -> int:
        sent = 0
        for i, data in enumerate(layers):
            if not self.channel.take_credit():  # clean: near miss, returned on both breaks, else the receiver returns it
                break
            lease = self._pack(data)  # leak: the handled ChannelClosed returns only the credit
            if lease is None:
                self.channel.return_credit()
                break
            try:
                self.channel.push(Frame(f"{key}/{i}", lease, last=i == len(layers) - 1))
            except ChannelClosed:
                logger.info("%s: closed after %d layers", key, sent)
                self.channel.return_credit()
                break
            sent += 1
        return sent

    def retain(self, key: str, data: bytes) -> bool:
        lease = self._pack(data)  # clean: near miss, the lease that was there is closed by forget, this one is kept
        if lease is None:
            return False
        self.forget(key)
        self.retained[key] = lease
        return True

    def forget(self, key: str) -> None:
        lease = self.retained.pop(key, None)
        if lease is not None:
            self.pool.close_lease(lease)

    def checksum(self, items: Mapping[str, bytes]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for key, data in items.items():
            lease = self._pack(data)  # leak: the lease of a key with a sum of zero is not closed
            if lease is None:
                continue
            total = sum(lease.payload()) & 0xFFFF
            if not total:
                continue
            sums[key] = total
            self.pool.close_lease(lease)
        return sums

    def close(self) -> None:
        for key in list(self.retained):
            self.forget(key)
        self.channel.drain(self.pool)
