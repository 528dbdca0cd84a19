"""Paged KV cache for the inference worker: block allocator, sequences, prefix cache, speculative decoding."""
from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Callable, Sequence as Seq

import torch

log = logging.getLogger("infer.kv")

BLOCK = 16


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    """Blocks are plain ints. Each holder of a block counts, the last free() returns it to the list."""

    def __init__(self, count: int, name: str = "gpu"):
        self.name = name
        self._free: deque[int] = deque(range(count))
        self._refs = [0] * count

    @property
    def idle(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        if not self._free:
            raise OutOfBlocks(self.name)
        block = self._free.popleft()  # clean: returned to the caller
        self._refs[block] = 1
        return block

    def alloc_span(self, count: int) -> list[int]:
        span = []
        for done in range(count):
            if not self._free:
                raise OutOfBlocks(f"{self.name}: {done} of {count}")
            block = self._free.popleft()  # leak: when the list runs dry half way the blocks of the span so far are lost
            self._refs[block] = 1
            span.append(block)
        return span

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def free_all(self, blocks: list[int]) -> None:
        while blocks:
            self.free(blocks.pop())

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1


@dataclass
class Sequence:
    tokens: list[int]
    alloc: BlockAllocator
    blocks: list[int] = field(default_factory=list)
    logprob: float = 0.0

    def append(self, token: int, copy_block: Callable[[int, int], None]) -> None:
        if len(self.tokens) % BLOCK == 0:
            self.blocks.append(self.alloc.alloc())  # clean: near miss, owned by the sequence and freed by release()
        elif self.alloc.shared(self.blocks[-1]):
            fresh = self.alloc.alloc()  # clean: near miss, replaces the shared block, whose reference is dropped
            copy_block(self.blocks[-1], fresh)
            old, self.blocks[-1] = self.blocks[-1], fresh
            self.alloc.free(old)
        self.tokens.append(token)

    def fork(self) -> Sequence:
        blocks = [self.alloc.share(b) for b in self.blocks]  # clean: owned by the child, which is returned
        return Sequence(list(self.tokens), self.alloc, blocks, self.logprob)

    def release(self) -> None:
        self.alloc.free_all(self.blocks)


class PrefixCache:
    def __init__(self, alloc: BlockAllocator, limit: int):
        self._alloc, self._limit = alloc, limit
        self._table: OrderedDict[int, int] = OrderedDict()

    @staticmethod
    def _keys(tokens: Seq[int]) -> list[int]:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [hash(tuple(tokens[:end])) for end in ends]

    def match(self, tokens: Seq[int]) -> list[int]:
        found = []
        for key in self._keys(tokens):
            block = self._table.get(key)
            if block is None:
                break
            self._table.move_to_end(key)
            found.append(self._alloc.share(block))  # clean: the list goes to the caller
        return found

    def remember(self, seq: Sequence) -> None:
        for key, block in zip(self._keys(seq.tokens), seq.blocks):
            self._table[key] = self._alloc.share(block)  # leak: the reference of an entry with the same key is overwritten
        while len(self._table) > self._limit:
            _, block = self._table.popitem(last=False)
            self._alloc.free(block)

    def clear(self) -> None:
        while self._table:
            self._alloc.free(self._table.popitem()[1])


class Engine:
    def __init__(self, model, gpu: BlockAllocator, host: BlockAllocator, cache: PrefixCache):
        self.model, self.gpu, self.host, self.cache = model, gpu, host, cache
        self.running: list[Sequence] = []
        self._swapped: dict[int, list[int]] = {}

    def admit(self, tokens: list[int]) -> bool:
        blocks = self.cache.match(tokens)  # leak: when the rest does not fit, the handler drops the matched blocks
        missing = math.ceil(len(tokens) / BLOCK) - len(blocks)
        try:
            blocks += self.gpu.alloc_span(missing)  # clean: joins the blocks of the sequence, freed by finish()
        except OutOfBlocks as exc:
            log.info("prompt of %d tokens waits: %s", len(tokens), exc)
            return False
        seq = Sequence(list(tokens), self.gpu, blocks)
        self.cache.remember(seq)
        self.running.append(seq)
        return True

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.cache.remember(seq)
        seq.release()

    def swap_out(self, seq: Sequence) -> bool:
        held: list[int] = []
        try:
            for _ in seq.blocks:
                held.append(self.host.alloc())  # clean: near miss, freed by the handler, or kept in the table until swap_in()
        except OutOfBlocks:
            self.host.free_all(held)
            return False
        self.model.copy_blocks(seq.blocks, held, to="host")
        self.running.remove(seq)
        seq.release()
        self._swapped[id(seq)] = held
        return True

    def swap_in(self, seq: Sequence) -> bool:
        held = self._swapped[id(seq)]
        if self.gpu.idle < len(held):
            return False
        seq.blocks = self.gpu.alloc_span(len(held))  # clean: the idle count is checked before, owned by the sequence
        self.model.copy_blocks(held, seq.blocks, to="gpu")
        del self._swapped[id(seq)]
        self.host.free_all(held)
        self.running.append(seq)
        return True

    def speculate(self, seq: Sequence, draft: list[int]) -> int:
        """Verify draft tokens in scratch blocks. Full blocks of accepted tokens are kept."""
        scratch = self.gpu.alloc_span(math.ceil(len(draft) / BLOCK))  # leak: the return for a draft that was rejected at once
        logits = self.model.verify(seq.tokens, draft, seq.blocks + scratch)
        picks = torch.argmax(logits, dim=-1).tolist()
        accepted = 0
        for want, got in zip(draft, picks):
            if want != got:
                break
            accepted += 1
        if accepted == 0:
            log.debug("draft rejected")
            return 0
        keep = accepted // BLOCK
        seq.blocks.extend(scratch[:keep])
        seq.tokens.extend(draft[:keep * BLOCK])
        self.gpu.free_all(scratch[keep:])
        return accepted

    def score(self, tokens: list[int]) -> float:
        """Log probability of a text; nothing of it stays in the cache."""
        blocks = self.gpu.alloc_span(math.ceil(len(tokens) / BLOCK))  # clean: freed in the finally
        try:
            logits = self.model.forward(tokens, blocks)
            picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])
            return picked.sum().item()
        finally:
            self.gpu.free_all(blocks)


def beam_search(engine: Engine, root: Sequence, width: int, steps: int, eos: int) -> tuple[Sequence, list[list[int]]]:
    """Takes over the root. Gives the best open beam, which the caller releases, and the texts that ended."""
    beams, ended = [root], []
    for step in range(steps):
        grown: list[Sequence] = []
        for beam in beams:
            for token, logprob in engine.model.top(beam.tokens, beam.blocks, width):
                child = beam.fork()  # leak: a child that ends with eos is dropped, only its tokens are kept
                child.logprob += logprob
                if token == eos:
                    ended.append(child.tokens)
                    continue
                try:
                    child.append(token, engine.model.copy_block)
                except OutOfBlocks:
                    child.release()
                    continue
                grown.append(child)
        if not grown:
            log.debug("no beam could grow at step %d", step)
            break
        grown.sort(key=lambda b: b.logprob, reverse=True)
        for beam in beams + grown[width:]:
            beam.release()
        beams = grown[:width]
    best, *others = beams
    for beam in others:
        beam.release()
    return best, ended


def best_of(engine: Engine, root: Sequence, count: int, sample: Callable[[Sequence], int]) -> list[int]:
    best: Sequence | None = None
    for _ in range(count):
        trial = root.fork()  # clean: near miss, the loser of each round is released, the winner after the loop
        try:
            trial.append(sample(trial), engine.model.copy_block)
        except OutOfBlocks:
            trial.release()
            break
        trial.logprob = engine.model.logprob(trial.tokens, trial.blocks)
        if best is not None and best.logprob >= trial.logprob:
            trial.release()
            continue
        if best is not None:
            best.release()
        best = trial
    if best is None:
        return list(root.tokens)
    tokens = list(best.tokens)
    best.release()
    return tokens
