from __future__ import annotations

from typing import Callable

from .resources import EncoderCache, GrammarSlots, PagePool
from .scheduler import Scheduler
from .sequence import SamplingParams, Sequence

StepFn = Callable[[list[Sequence]], list[int]]


class Engine:
    def __init__(self, step: StepFn, num_pages: int = 1024, page_size: int = 16, eos: int = 2) -> None:
        self.step_fn = step
        self.eos = eos
        self.pages = PagePool(num_pages, page_size)
        self.encoder = EncoderCache(32)
        self.scheduler = Scheduler(self.pages, self.encoder, GrammarSlots(16))
        self.live: dict[int, Sequence] = {}
        self.watermark: list[int] | None = None

    def add_request(self, prompt: list[int], params: SamplingParams, images: list[str] | None = None) -> int:
        seq = Sequence(prompt, params, images or [])
        self.live[seq.seq_id] = seq
        self.scheduler.add(seq)
        return seq.seq_id

    def step(self) -> dict[int, int]:
        batch = self.scheduler.schedule_prefill() or self.scheduler.schedule_decode()
        if not batch:
            return {}
        out: dict[int, int] = {}
        for seq, token in zip(batch, self.step_fn(batch)):
            seq.output.append(token)
            out[seq.seq_id] = token
            if token == self.eos or len(seq.output) >= seq.params.max_tokens:
                self.scheduler.finish(seq)
                del self.live[seq.seq_id]
        return out

    def abort(self, seq_id: int) -> bool:
        seq = self.live.pop(seq_id, None)
        if seq is None:
            return False
        self.scheduler.abort(seq)
        return True

    def hold_watermark(self, n: int) -> bool:
        if self.watermark is not None:
            self.pages.free(self.watermark)
        self.watermark = self.pages.allocate(n)  # clean: near miss, the earlier pages are freed first, drop_watermark frees these
        return self.watermark is not None

    def drop_watermark(self) -> None:
        if self.watermark is not None:
            self.pages.free(self.watermark)
            self.watermark = None

    def profile(self, prompt_lens: list[int]) -> int:
        peak = 0
        for n in prompt_lens:
            pages = self.pages.allocate(-(-n // self.pages.page_size))  # leak: a step that runs out of memory goes on without freeing the pages
            if pages is None:
                break
            probe = Sequence([0] * n, SamplingParams(max_tokens=1), pages=pages)
            try:
                self.step_fn([probe])
            except MemoryError:
                continue
            peak = max(peak, n)
            self.pages.free(pages)
        return peak

    def warm_encoder(self, keys: list[str]) -> int:
        ok = 0
        for key in keys:
            if not self.encoder.incref(key):  # clean: near miss, uncounted at the end of the round
                break
            ok += 1
            self.encoder.decref(key)
        return ok
