"""The prefill side."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .buffers import BufferBank, BufferLease


@dataclass
class OutgoingRequest:
    req_id: str
    layers: list[BufferLease] = field(default_factory=list)
    header: BufferLease | None = None
    aborted: bool = False


class KVProducer:
    def __init__(self, bank: BufferBank, wire):
        self.bank = bank
        self.wire = wire
        self.outgoing: dict[str, OutgoingRequest] = {}

    def begin(self, req_id: str) -> OutgoingRequest:
        return self.outgoing.setdefault(req_id, OutgoingRequest(req_id))

    def save_layer(self, req_id: str, kv: torch.Tensor) -> bool:
        lease = self.bank.lease_for(kv.numel())  # leak: an unknown or aborted request returns without return_()
        if lease is None:
            return False
        req = self.outgoing.get(req_id)
        if req is None or req.aborted:
            return False
        lease.data[: kv.numel()].copy_(kv.reshape(-1))
        req.layers.append(lease)
        return True

    def save_layers(self, req_id: str, kvs: list[torch.Tensor]) -> bool:
        req = self.outgoing.get(req_id)
        if req is None or req.aborted:
            return False
        for kv in kvs:
            lease = self.bank.lease_for(kv.numel())  # clean: near miss, earlier layers stay in req.layers, which request_finished() empties
            if lease is None:
                return False
            lease.data[: kv.numel()].copy_(kv.reshape(-1))
            req.layers.append(lease)
        return True

    def save_header(self, req_id: str, header: torch.Tensor) -> bool:
        req = self.outgoing.get(req_id)
        if req is None:
            return False
        req.header = self.bank.lease_for(header.numel())  # leak: request_finished() returns the layers only
        if req.header is None:
            return False
        req.header.data[: header.numel()].copy_(header)
        return True

    def send_now(self, kv: torch.Tensor) -> bool:
        lease = self.bank.lease_for(kv.numel())  # clean: returned after the send
        if lease is None:
            return False
        lease.data[: kv.numel()].copy_(kv.reshape(-1))
        sent = bool(self.wire.send(lease.data))
        lease.return_()
        return sent

    def send_until_ok(self, kv: torch.Tensor, tries: int) -> bool:
        for _ in range(tries):
            lease = self.bank.lease_for(kv.numel())  # leak: a refused send goes on to the next try and the next lease
            if lease is None:
                return False
            lease.data[: kv.numel()].copy_(kv.reshape(-1))
            if not self.wire.send(lease.data):
                continue
            lease.return_()
            return True
        return False

    def request_finished(self, req_id: str) -> None:
        req = self.outgoing.pop(req_id, None)
        if req is None:
            return
        for lease in req.layers:
            lease.return_()
        req.layers.clear()
