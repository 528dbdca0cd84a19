"""KV blocks for in-training rollouts.

The trainer generates samples between optimizer steps. Generation shares the GPU
with the optimizer, so KV memory is a small fixed pool of blocks with reference
counts (several samples of one prompt share the prompt's blocks).
"""
from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field

log = logging.getLogger("rollout")


class OutOfBlocks(RuntimeError):
    pass


class BlockStore:
    def __init__(self, total: int):
        self._free = list(range(total))
        heapq.heapify(self._free)
        self._refs = [0] * total

    @property
    def available(self) -> int:
        return len(self._free)

    def grab(self) -> int:
        if not self._free:
            raise OutOfBlocks()
        b = heapq.heappop(self._free)  # clean: returned to the caller with one reference
        self._refs[b] = 1
        return b

    def grab_or_none(self) -> int | None:
        if not self._free:
            return None
        return self.grab()  # clean: returned to the caller

    def grab_many(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self.grab() for _ in range(n)]  # clean: returned to the caller in a list

    def share(self, b: int) -> int:
        self._refs[b] += 1
        return b

    def drop(self, b: int) -> None:
        self._refs[b] -= 1
        if self._refs[b] == 0:
            heapq.heappush(self._free, b)

    def refs(self, b: int) -> int:
        return self._refs[b]


@dataclass
class Sample:
    uid: int
    prompt: list[int]
    max_new: int = 256
    out: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    finished: bool = False


class RolloutScheduler:
    def __init__(self, store: BlockStore, block_size: int = 16):
        self.store = store
        self.block_size = block_size
        self.running: dict[int, Sample] = {}
        self.prefix: dict[tuple[int, ...], list[int]] = {}
        self.pinned: dict[int, int] = {}
        self.share_prompts = True

    def _needed(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    # -- admission --------------------------------------------------------------

    def admit(self, s: Sample) -> bool:
        blocks = self.store.grab_many(self._needed(len(s.prompt)))  # clean: near miss, moved into the sample in running, which finish() drops
        if blocks is None:
            return False
        s.blocks = blocks
        self.running[s.uid] = s
        return True

    def admit_bounded(self, s: Sample, limit: int) -> bool:
        blocks = self.store.grab_many(self._needed(len(s.prompt) + s.max_new))  # leak: over the limit the list is dropped
        if blocks is None:
            return False
        if len(self.running) >= limit:
            log.debug("sample %d waits", s.uid)
            return False
        s.blocks = blocks
        self.running[s.uid] = s
        return True

    def admit_one_by_one(self, s: Sample) -> bool:
        got: list[int] = []
        for _ in range(self._needed(len(s.prompt))):
            b = self.store.grab_or_none()  # leak: the blocks got before None are not dropped
            if b is None:
                return False
            got.append(b)
        s.blocks.extend(got)
        self.running[s.uid] = s
        return True

    def admit_rollback(self, s: Sample) -> bool:
        got: list[int] = []
        try:
            for _ in range(self._needed(len(s.prompt))):
                got.append(self.store.grab())  # clean: near miss, the handler of OutOfBlocks drops what was got
        except OutOfBlocks:
            for b in got:
                self.store.drop(b)
            return False
        s.blocks.extend(got)
        self.running[s.uid] = s
        return True

    # -- decoding ---------------------------------------------------------------

    def extend(self, s: Sample) -> bool:
        if len(s.prompt) + len(s.out) < len(s.blocks) * self.block_size:
            return True
        b = self.store.grab_or_none()  # clean: appended to the sample's blocks
        if b is None:
            return False
        s.blocks.append(b)
        return True

    def speculate(self, s: Sample, draft: list[int]) -> int:
        spare = self.store.grab()  # leak: not dropped when no draft token is accepted
        accepted = self._verify(s, draft, spare)
        if accepted == 0:
            return 0
        s.out.extend(draft[:accepted])
        self.store.drop(spare)
        return accepted

    def _verify(self, s: Sample, draft: list[int], spare: int) -> int:
        n = 0
        for tok in draft:
            if tok in s.prompt:
                break
            n += 1
        return n

    # -- sharing ----------------------------------------------------------------

    def fork(self, parent: Sample, uid: int) -> Sample:
        if uid in self.running:
            raise ValueError(f"sample {uid} is running")
        child = Sample(uid, parent.prompt, parent.max_new)
        for b in parent.blocks:
            child.blocks.append(self.store.share(b))  # clean: the reference belongs to the child in running
        self.running[uid] = child
        return child

    def fork_n(self, parent: Sample, uids: list[int]) -> list[Sample]:
        children = []
        for uid in uids:
            refs = [self.store.share(b) for b in parent.blocks]  # leak: references taken for an id that runs already are dropped
            if uid in self.running:
                continue
            child = Sample(uid, parent.prompt, parent.max_new, blocks=refs)
            self.running[uid] = child
            children.append(child)
        return children

    def copy_on_write(self, s: Sample, i: int) -> bool:
        old = s.blocks[i]
        if self.store.refs(old) == 1:
            return True
        fresh = self.store.grab_or_none()  # clean: replaces the shared block, which is dropped
        if fresh is None:
            return False
        s.blocks[i] = fresh
        self.store.drop(old)
        return True

    def remember_prefix(self, s: Sample) -> None:
        key = tuple(s.prompt)
        if not self.share_prompts or key in self.prefix:
            return
        self.prefix[key] = [self.store.share(b) for b in s.blocks]  # clean: near miss, only for new keys; forget_prefixes() drops them

    def forget_prefixes(self) -> None:
        while self.prefix:
            _, blocks = self.prefix.popitem()
            for b in blocks:
                self.store.drop(b)

    def pin_sink(self, uid: int) -> None:
        self.pinned[uid] = self.store.grab()  # leak: pinning the same id again overwrites its first block

    def unpin_all(self) -> None:
        for b in self.pinned.values():
            self.store.drop(b)
        self.pinned.clear()

    # -- end --------------------------------------------------------------------

    def finish(self, uid: int) -> None:
        s = self.running.pop(uid, None)
        if s is None:
            return
        for b in s.blocks:
            self.store.drop(b)
        s.blocks.clear()
        s.finished = True

    def preempt_last(self) -> Sample | None:
        if not self.running:
            return None
        uid = next(reversed(self.running))
        s = self.running[uid]
        self.finish(uid)
        s.finished = False
        return s
