"""Continuous batching over paged KV blocks, sampler rows and adapter pins."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

BLOCK_TOKENS = 16


class BlockPool:
    def __init__(self, total: int) -> None:
        self._free = deque(range(total))

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def give(self, ids: list[int]) -> None:
        self._free.extend(ids)


class SamplerRows:
    """Row numbers of the fixed penalties table."""

    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))

    def __len__(self) -> int:
        return len(self._rows)

    def claim(self) -> int:
        return self._rows.pop()

    def vacate(self, row: int) -> None:
        self._rows.append(row)


class AdapterPins:
    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def pin(self, name: str) -> str:
        self._count[name] = self._count.get(name, 0) + 1
        return name

    def unpin(self, name: str) -> None:
        self._count[name] -= 1
        if self._count[name] == 0:
            del self._count[name]

    def evictable(self, name: str) -> bool:
        return name not in self._count


@dataclass
class Sequence:
    req_id: str
    tokens: list[int]
    max_len: int
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    grammar_row: int = -1
    adapter: str | None = None
    output: list[int] = field(default_factory=list)

    def needs_block(self) -> bool:
        return (len(self.tokens) + len(self.output)) > len(self.blocks) * BLOCK_TOKENS


class Engine:
    def __init__(self, blocks: BlockPool, rows: SamplerRows, grammar_rows: SamplerRows, pins: AdapterPins):
        self.blocks = blocks
        self.rows = rows
        self.grammar_rows = grammar_rows
        self.pins = pins
        self.running: dict[str, Sequence] = {}
        self.swapped: deque[Sequence] = deque()
        self.finished_tokens = 0

    def admit(self, req_id: str, tokens: list[int], max_len: int, adapter: str | None, schema: str | None) -> bool:
        if req_id in self.running or not len(self.rows) or not len(self.grammar_rows):
            return False
        need = -(-len(tokens) // BLOCK_TOKENS)
        blocks = self.blocks.take(need)  # clean: near miss, finish, cancel and preempt all give the list back
        if blocks is None:
            return False
        seq = Sequence(req_id, tokens, max_len, blocks)
        seq.row = self.rows.claim()  # leak: cancel() vacates the row, finish() does not
        if schema is not None:
            seq.grammar_row = self.grammar_rows.claim()  # clean: near miss, _drop_grammar() in both ends
        if adapter is not None:
            seq.adapter = self.pins.pin(adapter)  # leak: cancel() drops the record with the pin in it
        self.running[req_id] = seq
        return True

    def append(self, req_id: str, token: int) -> bool:
        seq = self.running[req_id]
        seq.output.append(token)
        if seq.needs_block():
            more = self.blocks.take(1)  # clean: near miss, joins the list that every end gives back
            if more is None:
                self.preempt(req_id)
                return False
            seq.blocks.extend(more)
        if len(seq.output) >= seq.max_len:
            self.finish(req_id)
        return True

    def preempt(self, req_id: str) -> None:
        """Moves a sequence out of the batch; its KV is recomputed on return."""
        seq = self.running.pop(req_id)
        self.blocks.give(seq.blocks)
        seq.blocks = []
        self.swapped.append(seq)

    def resume(self) -> int:
        resumed = 0
        while self.swapped:
            seq = self.swapped[0]
            want = (len(seq.tokens) + len(seq.output)) // BLOCK_TOKENS + 1
            got = self.blocks.take(want)  # clean: near miss, preempt emptied it
            if got is None:
                break
            self.swapped.popleft()
            seq.blocks = got
            if len(self.rows):
                seq.row = self.rows.claim()  # leak: overwrites the row that preempt kept, finish() has none
            self.running[seq.req_id] = seq
            resumed += 1
        return resumed

    def _drop_grammar(self, seq: Sequence) -> None:
        if seq.grammar_row >= 0:
            self.grammar_rows.vacate(seq.grammar_row)
            seq.grammar_row = -1

    def finish(self, req_id: str) -> list[int]:
        seq = self.running.pop(req_id)
        self.blocks.give(seq.blocks)
        self._drop_grammar(seq)
        if seq.adapter is not None:
            self.pins.unpin(seq.adapter)
        self.finished_tokens += len(seq.output)
        return seq.output

    def cancel(self, req_id: str) -> bool:
        seq = self.running.pop(req_id, None)
        if seq is None:
            return False
        self.blocks.give(seq.blocks)
        self.rows.vacate(seq.row)
        self._drop_grammar(seq)
        return True
