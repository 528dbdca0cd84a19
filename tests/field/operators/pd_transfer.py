"""Prefill side of PD disaggregation: staging of KV pages and their transfer."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import Enum

import torch

logger = logging.getLogger(__name__)


class TransferState(Enum):
    PENDING = 0
    SENDING = 1
    DONE = 2
    FAILED = 3


class StagingBudget:
    """Bytes of pinned memory that transfers may have in flight."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0

    def reserve(self, nbytes: int) -> bool:
        if self.in_flight + nbytes > self.limit:
            return False
        self.in_flight += nbytes  # clean: near miss, taken only on the path that answers True, which the caller owns
        return True

    def refund(self, nbytes: int) -> None:
        self.in_flight -= nbytes


class ChannelPool:
    """RDMA channels to decode workers, idle ones in a queue."""

    def __init__(self, channels: list) -> None:
        self._idle: asyncio.Queue = asyncio.Queue()
        for channel in channels:
            self._idle.put_nowait(channel)

    async def borrow(self):
        return await self._idle.get()  # clean: to the caller

    def try_borrow(self):
        """An idle channel, or None."""
        try:
            return self._idle.get_nowait()  # clean: to the caller
        except asyncio.QueueEmpty:
            return None

    def give_back(self, channel) -> None:
        self._idle.put_nowait(channel)


@dataclass
class Transfer:
    rid: str
    dest: str
    pages: list[torch.Tensor]
    nbytes: int = 0
    channel: object | None = None
    state: TransferState = TransferState.PENDING
    retries: int = 0


class PrefillSender:
    """Moves the KV pages of finished prefills to decode workers."""

    def __init__(self, budget: StagingBudget, channels: ChannelPool, max_retries: int = 3) -> None:
        self.budget = budget
        self.channels = channels
        self.max_retries = max_retries
        self.pending: dict[str, Transfer] = {}

    def submit(self, transfer: Transfer) -> bool:
        """Queue a transfer; False asks the scheduler to try again later."""
        nbytes = sum(p.numel() * p.element_size() for p in transfer.pages)
        if not self.budget.reserve(nbytes):  # leak: a duplicate id is refused after the bytes were reserved
            return False
        if transfer.rid in self.pending:
            logger.warning("transfer %s is already queued", transfer.rid)
            return False
        transfer.nbytes = nbytes
        self.pending[transfer.rid] = transfer
        return True

    async def send(self, rid: str) -> bool:
        """Send one queued transfer and settle its budget."""
        transfer = self.pending.pop(rid)
        channel = await self.channels.borrow()  # clean: given back in the finally
        try:
            transfer.state = TransferState.SENDING
            for page in transfer.pages:
                await channel.write(transfer.dest, page)
            transfer.state = TransferState.DONE
        except ConnectionError:
            transfer.state = TransferState.FAILED
        finally:
            self.channels.give_back(channel)
            self.budget.refund(transfer.nbytes)
        return transfer.state is TransferState.DONE

    async def send_with_retry(self, transfer: Transfer) -> bool:
        """Send outside of the queue, on a new channel per attempt."""
        for attempt in range(self.max_retries):
            channel = await self.channels.borrow()  # leak: after a failed attempt the handler goes on without giving it back
            try:
                for page in transfer.pages:
                    await channel.write(transfer.dest, page)
            except ConnectionError:
                transfer.retries = attempt + 1
                continue
            self.channels.give_back(channel)
            return True
        return False

    async def send_metadata(self, rid: str, payload: bytes) -> bool:
        """Tell the decode worker what will arrive."""
        for _ in range(self.max_retries):
            channel = await self.channels.borrow()  # clean: near miss, both the return and the continue run the finally
            try:
                if await channel.post(rid, payload):
                    return True
                continue
            finally:
                self.channels.give_back(channel)
        return False

    def start_stream(self, transfer: Transfer) -> bool:
        """Bind a channel to a layer-by-layer transfer."""
        if transfer.channel is not None:
            return True
        channel = self.channels.try_borrow()  # clean: near miss, kept in the transfer until end_stream()
        if channel is None:
            return False
        transfer.channel = channel
        transfer.state = TransferState.SENDING
        return True

    def end_stream(self, transfer: Transfer, ok: bool) -> None:
        transfer.state = TransferState.DONE if ok else TransferState.FAILED
        if transfer.channel is not None:
            self.channels.give_back(transfer.channel)
            transfer.channel = None

    def rebind(self, transfer: Transfer, dest: str) -> bool:
        """Point a running stream at another decode worker."""
        if transfer.channel is None:
            return False
        channel = self.channels.try_borrow()  # leak: overwrites the channel the stream has, which is not given back
        if channel is None:
            return False
        channel.connect(dest)
        transfer.dest = dest
        transfer.channel = channel
        return True

    def submit_group(self, transfers: list[Transfer]) -> bool:
        """Queue all transfers of a parallel-sampling group, or none."""
        if any(t.rid in self.pending for t in transfers):
            return False
        reserved = 0
        for transfer in transfers:
            nbytes = sum(p.numel() * p.element_size() for p in transfer.pages)
            if not self.budget.reserve(nbytes):  # clean: near miss, what was reserved so far is refunded as one sum
                self.budget.refund(reserved)
                return False
            reserved += nbytes
            transfer.nbytes = nbytes
        for transfer in transfers:
            self.pending[transfer.rid] = transfer
        return True

    async def ping(self, dest: str) -> float | None:
        """Round trip to a decode worker in milliseconds."""
        if not self.budget.reserve(64):  # leak: only the answered ping refunds its bytes
            return None
        channel = await self.channels.borrow()  # leak: an unanswered ping returns with the channel
        rtt = await channel.ping(dest)
        if rtt is None:
            return None
        self.channels.give_back(channel)
        self.budget.refund(64)
        return rtt * 1e3
