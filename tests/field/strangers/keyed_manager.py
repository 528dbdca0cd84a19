"""The manager keeps the handles itself: callers name a sequence."""
from typing import Dict, List


class KeyedBlocks:
    """allocate(seq) and free(seq): the sequence id is the handle."""

    def __init__(self, total):
        self._idle: List[int] = list(range(total))
        self._of: Dict[int, List[int]] = {}

    def can_allocate(self, n):
        return len(self._idle) >= n

    def allocate(self, seq_id, n):
        blocks = [self._idle.pop() for _ in range(n)]
        self._of[seq_id] = blocks
        return blocks

    def free(self, seq_id):
        self._idle.extend(self._of.pop(seq_id))

    def blocks_of(self, seq_id):
        return list(self._of[seq_id])


def generate(manager: KeyedBlocks, seq_id: int, steps: int, model) -> list:
    if not manager.can_allocate(steps):
        return []
    manager.allocate(seq_id, steps)  # clean: near miss, result dropped, freed by id
    try:
        return [model(seq_id, s) for s in range(steps)]
    finally:
        manager.free(seq_id)


def embed(manager: KeyedBlocks, seq_id: int, tokens: list, model):
    manager.allocate(seq_id, len(tokens))  # leak: no model output, no free
    out = model(seq_id, tokens)
    if out is None:
        return None
    manager.free(seq_id)
    return out


def rerank(manager: KeyedBlocks, pairs: list, model) -> list:
    scores = []
    for seq_id, tokens in pairs:
        blocks = manager.allocate(seq_id, len(tokens))  # clean: near miss, freed by id before both ways on
        if len(blocks) > 16:
            manager.free(seq_id)
            continue
        scores.append(model(seq_id, tokens))
        manager.free(seq_id)
    return scores


def best_of(manager: KeyedBlocks, base: int, n: int, model):
    for i in range(n):
        manager.allocate(base + i, 4)  # leak: the loop that frees starts at one
    scored = [model(base + i, ()) for i in range(n)]
    for i in range(1, n):
        manager.free(base + i)
    return max(scored)


def best_of_all(manager: KeyedBlocks, base: int, n: int, model):
    ids = [base + i for i in range(n)]
    for seq_id in ids:
        manager.allocate(seq_id, 4)  # clean: near miss, a second loop over the same ids frees
    scored = [model(seq_id, ()) for seq_id in ids]
    for seq_id in ids:
        manager.free(seq_id)
    return max(scored)
