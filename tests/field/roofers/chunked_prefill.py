"""Chunked prefill: KV blocks are allocated as the prompt is fed through."""
from __future__ import annotations

import logging
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional

log = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))

    def allocate(self, n: int) -> list[int]:
        if n > len(self._free):
            raise OutOfBlocks(f"want {n}, have {len(self._free)}")
        taken = self._free[-n:] if n else []
        del self._free[len(self._free) - n:]
        return taken

    def free(self, blocks: list[int]) -> None:
        self._free.extend(blocks)

    def need(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def available(self) -> int:
        return len(self._free)


@dataclass
class Prompt:
    rid: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.done


@contextmanager
def temporary_blocks(pool: BlockPool, n: int) -> Iterator[list[int]]:
    blocks = pool.allocate(n)  # clean: freed in finally
    try:
        yield blocks
    finally:
        pool.free(blocks)


@contextmanager
def scratch_blocks(pool: BlockPool, n: int) -> Iterator[list[int]]:
    """Blocks for logprob re-computation; skips the allocation for n == 0."""
    blocks = pool.allocate(n) if n else []  # leak: an exception that recompute survives passes the free by
    yield blocks
    if blocks:
        pool.free(blocks)


def recompute(pool: BlockPool, prompt: Prompt, forward: Callable[[list[int], list[int]], Any]) -> Optional[Any]:
    try:
        with scratch_blocks(pool, pool.need(len(prompt.tokens))) as blocks:  # clean: with, the manager is at fault
            return forward(prompt.tokens, blocks)
    except (OutOfBlocks, ValueError) as e:
        log.info("recompute of %s skipped: %s", prompt.rid, e)
        return None


def embed(pool: BlockPool, tokens: list[int], forward: Callable[[list[int], list[int]], Any]) -> Any:
    with temporary_blocks(pool, pool.need(len(tokens))) as blocks:  # clean: with
        return forward(tokens, blocks)


class ChunkedPrefill:
    def __init__(self, pool: BlockPool, chunk: int, forward: Callable[[list[int], list[int]], Any]) -> None:
        self.pool = pool
        self.chunk = chunk
        self.forward = forward
        self.finished: dict[str, Prompt] = {}

    def step(self, prompt: Prompt) -> bool:
        n = min(self.chunk, prompt.remaining)
        want = self.pool.need(prompt.done + n) - len(prompt.blocks)
        if want > 0:
            try:
                prompt.blocks.extend(self.pool.allocate(want))  # clean: moved into the prompt, freed by release
            except OutOfBlocks:
                return False
        self.forward(prompt.tokens[prompt.done:prompt.done + n], prompt.blocks)
        prompt.done += n
        if prompt.remaining == 0:
            self.finished[prompt.rid] = prompt
        return True

    def release(self, rid: str) -> None:
        prompt = self.finished.pop(rid, None)
        if prompt is not None:
            blocks, prompt.blocks = prompt.blocks, []
            self.pool.free(blocks)

    def restart(self, prompt: Prompt) -> None:
        """Forget the progress of a prompt whose weights changed under it."""
        stale, prompt.blocks = prompt.blocks, []
        self.pool.free(stale)
        prompt.blocks = self.pool.allocate(self.pool.need(self.chunk))  # clean: near miss, the old list was freed
        prompt.done = 0

    def windows(self, tokens: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Sliding windows, each with blocks of its own."""
        for start in range(0, len(tokens), self.chunk):
            blocks = self.pool.allocate(self.pool.need(self.chunk))  # clean: near miss, finally runs when perplexity closes the generator
            try:
                yield start, blocks
            finally:
                self.pool.free(blocks)

    def perplexity(self, tokens: list[int], stop: float) -> float:
        total = 0.0
        with closing(self.windows(tokens)) as wins:
            for start, blocks in wins:
                total += float(self.forward(tokens[start:start + self.chunk], blocks))
                if total > stop:
                    break
        return total

    def segments(self, tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        blocks: list[int] = []
        for start in range(0, len(tokens), self.chunk):
            part = tokens[start:start + self.chunk]
            blocks = self.pool.allocate(self.pool.need(len(part)))  # leak: every segment but the last is rebound before the free
            yield part, blocks
        if blocks:
            self.pool.free(blocks)

    def prefill_offline(self, tokens: list[int]) -> int:
        n = 0
        for part, blocks in self.segments(tokens):
            self.forward(part, blocks)
            n += 1
        return n

    def score_pair(self, a: list[int], b: list[int]) -> Optional[float]:
        left = self.pool.allocate(self.pool.need(len(a)))  # clean: near miss, freed in finally also when b does not fit
        try:
            right = self.pool.allocate(self.pool.need(len(b)))  # clean: freed in the inner finally
            try:
                return float(self.forward(a, left)) - float(self.forward(b, right))
            finally:
                self.pool.free(right)
        except OutOfBlocks:
            return None
        finally:
            self.pool.free(left)

    def admit(self, waiting: list[Prompt], budget: int) -> list[Prompt]:
        admitted = []
        for prompt in waiting:
            try:
                blocks = self.pool.allocate(self.pool.need(min(self.chunk, len(prompt.tokens))))  # leak: over budget the loop breaks with the blocks in hand
            except OutOfBlocks:
                break
            if prompt.remaining > budget:
                break
            budget -= prompt.remaining
            prompt.blocks.extend(blocks)
            admitted.append(prompt)
        return admitted

    def reserve_tail(self, prompt: Prompt, extra: int) -> int:
        """Room for generated tokens behind the prompt."""
        tail = self.pool.allocate(self.pool.need(extra))  # leak: the slice over the limit is dropped
        room = 64 - len(prompt.blocks)
        prompt.blocks += tail[:room]
        return len(prompt.blocks)
