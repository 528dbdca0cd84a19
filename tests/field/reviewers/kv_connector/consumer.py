"""The decode side."""
from __future__ import annotations

import torch

from .buffers import BufferBank, BufferLease


class KVConsumer:
    def __init__(self, bank: BufferBank, wire):
        self.bank = bank
        self.wire = wire
        self.landing: dict[str, list[BufferLease]] = {}

    def expect(self, req_id: str, layers: int) -> bool:
        if req_id in self.landing:
            return True
        group = self.bank.lease_group(layers)  # clean: near miss, an empty group holds nothing, others are taken by collect()
        if not group:
            return False
        self.landing[req_id] = group
        return True

    def expect_more(self, req_id: str, layers: int) -> bool:
        extra = self.bank.lease_group(layers)  # leak: for a request that is not expected the group is dropped
        if not extra:
            return False
        if req_id in self.landing:
            self.landing[req_id].extend(extra)
            return True
        return False

    def collect(self, req_id: str, out: list[torch.Tensor]) -> int:
        group = self.landing.pop(req_id, [])
        for lease in group:
            out.append(lease.data.clone())
            lease.return_()
        return len(group)

    def receive(self, numel: int) -> torch.Tensor | None:
        lease = self.bank.lease_for(numel)  # clean: cloned, then returned
        if lease is None:
            return None
        self.wire.recv(lease.data)
        out = lease.data[:numel].clone()
        lease.return_()
        return out

    def receive_or_skip(self, numel: int, wanted: bool) -> torch.Tensor | None:
        lease = self.bank.lease_for(numel)  # clean: near miss, the clone is conditional but return_() is not
        if lease is None:
            return None
        self.wire.recv(lease.data)
        out = None
        if wanted:
            out = lease.data[:numel].clone()
        lease.return_()
        return out

    def abort(self, req_id: str) -> None:
        for lease in self.landing.pop(req_id, []):
            lease.return_()
