"""Admission of prompts into a paged attention cache."""
from dataclasses import dataclass


class BlockPool:
    def __init__(self, total):
        self._free = list(range(total))

    def allocate(self, count):
        if count > len(self._free):
            return None
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def free(self, blocks):
        self._free.extend(blocks)


@dataclass
class Prompt:
    ident: str
    tokens: int
    priority: int = 0


def blocks_for(pool, prompt, block_size):
    need = (prompt.tokens + block_size - 1) // block_size
    return pool.allocate(need)  # clean: handed to the caller


class PrefillEngine:
    def __init__(self, pool, window, block_size=16):
        self.pool = pool
        self.window = window
        self.block_size = block_size
        self.running = {}
        self.waiting = []
        self.rejected = 0

    def admit(self, prompt):
        blocks = blocks_for(self.pool, prompt, self.block_size)  # leak: an oversized prompt returns
        if blocks is None:
            self.waiting.append(prompt)
            return False
        if prompt.tokens > self.window:
            self.rejected += 1
            return False
        self.running[prompt.ident] = blocks
        return True

    def extend(self, ident):
        extra = self.pool.allocate(1)  # clean: joined to the list of the running sequence
        if extra is None:
            return False
        self.running[ident].extend(extra)
        return True

    def finish(self, ident):
        blocks = self.running.pop(ident, None)
        if blocks:
            self.pool.free(blocks)

    def warm_up(self, sizes):
        widest = 0
        for size in sizes:
            blocks = blocks_for(self.pool, Prompt("warm", size), self.block_size)  # clean: freed each round
            if blocks is None:
                continue
            widest = max(widest, len(blocks))
            self.pool.free(blocks)
        return widest

    def probe_contiguous(self, count, attempts):
        best = None
        for _ in range(attempts):
            best = self.pool.allocate(count)  # leak: the next attempt overwrites it
            if best is not None and best[-1] - best[0] == count - 1:
                break
        if best is not None:
            self.pool.free(best)
        return best is not None
