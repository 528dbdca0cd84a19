from __future__ import annotations

from .pools import DisaggReq
from .receiver import DecodeQueue
from .sender import PrefillQueue


class DisaggScheduler:
    def __init__(self, prefill: PrefillQueue, decode: DecodeQueue) -> None:
        self.prefill = prefill
        self.decode = decode
        self.running: list[DisaggReq] = []

    def step_decode(self, arrived: list[str]) -> int:
        for rid in arrived:
            req = self.decode.finish_transfer(rid)  # leak: a failed request is skipped by continue and its pages are never released
            if req is None:
                continue
            if req.status == "failed":
                continue
            self.running.append(req)
        return len(self.running)

    def retire(self) -> int:
        done = [r for r in self.running if r.status == "done"]
        self.running = [r for r in self.running if r.status != "done"]
        for req in done:
            self.decode.release_finished(req)
        return len(done)

    def warmup(self, n_pages: int) -> bool:
        pages = self.decode.pages.alloc(n_pages)  # clean: freed at the end, None has nothing to free
        if pages is None:
            return False
        index = self.decode.meta.alloc()  # leak: only the pages are freed after the warmup
        if index is not None:
            self.decode.meta.first_token[index] = 1
        self.decode.pages.free(pages)
        return True
