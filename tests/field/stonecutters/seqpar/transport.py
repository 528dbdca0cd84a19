"""The head/sequence exchange."""
from __future__ import annotations

import logging
from typing import List, Optional, Tuple

import torch
import torch.distributed as dist

from .tensors import ExchangeTensors

log = logging.getLogger(__name__)


class PendingExchange:
    def __init__(self, owner: "Exchange", work, recv: torch.Tensor, send: torch.Tensor):
        self.owner = owner
        self.work = work
        self.recv = recv
        self.send = send

    def take(self) -> torch.Tensor:
        """Waits; the receive tensor goes to the caller, the send tensor goes home."""
        self.work.wait()
        self.owner.tensors.dismiss(self.send)
        return self.recv


class Exchange:
    def __init__(self, tensors: ExchangeTensors, group):
        self.tensors = tensors
        self.group = group
        self.world = dist.get_world_size(group)
        self.queue: List[PendingExchange] = []

    def start(self, x: torch.Tensor) -> Optional[PendingExchange]:
        send = self.tensors.summon(x.shape, x.dtype)  # leak: kept when there is no receive tensor
        if send is None:
            return None
        recv = self.tensors.summon(x.shape, x.dtype)  # clean: near miss, carried by PendingExchange, take() hands it to the caller
        if recv is None:
            log.debug("no receive tensor, the caller goes the blocking way")
            return None
        send.copy_(x)
        work = dist.all_to_all_single(recv, send, group=self.group, async_op=True)
        return PendingExchange(self, work, recv, send)

    def blocking(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        with self.tensors.loan(x.shape, x.dtype) as send:  # clean: the loan is dismissed by the with block
            if send is None:
                dist.all_to_all_single(out, x.contiguous(), group=self.group)
                return out
            send.copy_(x)
            dist.all_to_all_single(out, send, group=self.group)
        return out

    def enqueue(self, x: torch.Tensor) -> bool:
        pending = self.start(x)  # clean: near miss, queued, drain() takes it and dismisses what it received
        if pending is None:
            return False
        self.queue.append(pending)
        return True

    def drain(self, sink: List[torch.Tensor]) -> int:
        n = 0
        while self.queue:
            recv = self.queue.pop(0).take()
            sink.append(recv.clone())
            self.tensors.dismiss(recv)
            n += 1
        return n
