from __future__ import annotations

from collections import deque

from .resources import EncoderCache, GrammarSlots, PagePool
from .sequence import Sequence, SeqStatus


class Scheduler:
    def __init__(self, pages: PagePool, encoder: EncoderCache, grammars: GrammarSlots, max_seqs: int = 64) -> None:
        self.pages = pages
        self.encoder = encoder
        self.grammars = grammars
        self.max_seqs = max_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _hold_encoder(self, seq: Sequence) -> list[str] | None:
        held: list[str] = []
        for key in seq.images:
            if not self.encoder.incref(key):  # clean: near miss, the keys counted so far are uncounted on the refusal, else returned
                for k in held:
                    self.encoder.decref(k)
                return None
            held.append(key)
        return held

    def _drop_encoder(self, seq: Sequence) -> None:
        for key in seq.encoder_keys:
            self.encoder.decref(key)
        seq.encoder_keys.clear()

    def schedule_prefill(self) -> list[Sequence]:
        batch: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            keys = self._hold_encoder(seq)  # leak: the keys stay counted when the pages are refused, and are counted again at the next try
            if keys is None:
                break
            need = -(-len(seq) // self.pages.page_size)
            pages = self.pages.allocate(need)  # clean: the sequence's, freed on preemption, abort and finish
            if pages is None:
                break
            self.waiting.popleft()
            seq.pages, seq.encoder_keys = pages, keys
            seq.status = SeqStatus.RUNNING
            self.running.append(seq)
            batch.append(seq)
        return batch

    def schedule_decode(self) -> list[Sequence]:
        batch: list[Sequence] = []
        for seq in list(self.running):
            if seq.status is not SeqStatus.RUNNING:
                continue
            if len(seq) >= len(seq.pages) * self.pages.page_size:
                extra = self.pages.allocate(1)  # clean: near miss, None leads to preemption, else the sequence has it
                if extra is None:
                    self.preempt(seq)
                    continue
                seq.pages += extra
            batch.append(seq)
        return batch

    def reserve_output(self, seq: Sequence) -> bool:
        n = seq.params.max_tokens // self.pages.page_size
        pages = self.pages.allocate(n)  # leak: assigned over the pages that the prefill has given the sequence
        if pages is None:
            return False
        seq.pages = pages
        return True

    def extend_output(self, seq: Sequence, tokens: int) -> bool:
        if seq.status is not SeqStatus.RUNNING:
            return False
        short = len(seq) + tokens - len(seq.pages) * self.pages.page_size
        if short <= 0:
            return True
        pages = self.pages.allocate(-(-short // self.pages.page_size))  # clean: near miss, added to the sequence's pages
        if pages is None:
            return False
        seq.pages = seq.pages + pages
        return True

    def attach_grammar(self, seq: Sequence) -> bool:
        if seq.grammar_id is None:
            seq.grammar_id = self.grammars.attach()  # leak: finish detaches it, abort does not
        return seq.grammar_id is not None

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pages.free(seq.pages)
        seq.pages = []
        self._drop_encoder(seq)
        seq.status = SeqStatus.WAITING
        self.waiting.appendleft(seq)

    def abort(self, seq: Sequence) -> None:
        if seq in self.waiting:
            self.waiting.remove(seq)
        elif seq in self.running:
            self.running.remove(seq)
            self.pages.free(seq.pages)
            seq.pages = []
            self._drop_encoder(seq)
        seq.status = SeqStatus.ABORTED

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pages.free(seq.pages)
        seq.pages = []
        self._drop_encoder(seq)
        if seq.grammar_id is not None:
            self.grammars.detach(seq.grammar_id)
            seq.grammar_id = None
        seq.status = SeqStatus.FINISHED
