from __future__ import annotations

import torch

from . import BlockPool, DecodeConnector, PrefillConnector


class Engine:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.decode = DecodeConnector(pool)
        self.prefill = PrefillConnector(pool, self._loopback)

    def _loopback(self, req_id: str, block_id: int, data: torch.Tensor) -> bool:
        return self.decode.recv(req_id, data)  # clean: the page is in the decode table

    def handoff(self, req_id: str, kv: torch.Tensor) -> bool:
        if self.prefill.start(req_id, kv) is None:  # clean: near miss, pushed to the end or finished at once
            return False
        ok = self.prefill.push(req_id)
        if not ok:
            self.prefill.finish(req_id)
            self.decode.drop(req_id)
        return ok

    def handoff_once(self, req_id: str, kv: torch.Tensor) -> bool:
        tr = self.prefill.start(f"{req_id}#{id(kv)}", kv)  # leak: a transfer under a throw-away key is only finished when every page was sent
        if tr is None:
            return False
        if not self.prefill.push(tr.req_id):
            return False
        return True

    def scratch_copy(self, kv: torch.Tensor) -> torch.Tensor:
        pages = self.pool.allocate_slots(kv.shape[0])  # clean: freed after the stack
        for p, b in zip(pages, kv):
            p.data.copy_(b)
        out = torch.stack([p.data for p in pages])
        self.pool.free_slots(pages)
        return out
