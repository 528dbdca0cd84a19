"""Paged key/value memory: a region lends blocks, a block lends pages, sequences hold pages."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

PAGES_PER_BLOCK = 32


class Block:
    def __init__(self, base: int) -> None:
        self.base = base
        self.vacant = deque(range(PAGES_PER_BLOCK))

    def tear(self) -> int | None:
        return self.vacant.popleft() if self.vacant else None

    def paste(self, page: int) -> None:
        self.vacant.append(page)

    @property
    def whole(self) -> bool:
        return len(self.vacant) == PAGES_PER_BLOCK


class Region:
    def __init__(self, blocks: int) -> None:
        self._spare = [Block(i * PAGES_PER_BLOCK) for i in range(blocks)]

    def lift_block(self) -> Block | None:
        return self._spare.pop() if self._spare else None

    def lower_block(self, block: Block) -> None:
        self._spare.append(block)

    def __len__(self) -> int:
        return len(self._spare)


@dataclass(frozen=True)
class PageRef:
    block: Block
    page: int

    @property
    def physical(self) -> int:
        return self.block.base + self.page


class PageSource:
    def __init__(self, region: Region) -> None:
        self.region = region
        self.working: list[Block] = []

    def draw(self) -> PageRef | None:
        for block in self.working:
            page = block.tear()  # clean: handed to the caller inside the PageRef
            if page is not None:
                return PageRef(block, page)
        block = self.region.lift_block()  # clean: near miss, kept in working, put_away lowers it when whole
        if block is None:
            return None
        self.working.append(block)
        return PageRef(block, block.tear())  # clean: handed to the caller inside the PageRef

    def put_away(self, ref: PageRef) -> None:
        ref.block.paste(ref.page)
        if ref.block.whole:
            self.working.remove(ref.block)
            self.region.lower_block(ref.block)


@dataclass
class Sequence:
    id: int
    tokens: int = 0
    pages: list[PageRef] = field(default_factory=list)


class SequenceTable:
    def __init__(self, source: PageSource, page_tokens: int = 16) -> None:
        self.source = source
        self.page_tokens = page_tokens
        self.live: dict[int, Sequence] = {}

    def append(self, seq: Sequence, tokens: int) -> bool:
        while len(seq.pages) * self.page_tokens < seq.tokens + tokens:
            ref = self.source.draw()  # clean: near miss, kept with the sequence, put away in finish
            if ref is None:
                return False
            seq.pages.append(ref)
        seq.tokens += tokens
        return True

    def admit(self, seq_id: int, prompt: int) -> Sequence | None:
        if seq_id in self.live:
            return None
        need = -(-prompt // self.page_tokens)
        refs: list[PageRef] = []
        for _ in range(need):
            ref = self.source.draw()  # clean: near miss, put away when the prompt does not fit
            if ref is None:
                for taken in refs:
                    self.source.put_away(taken)
                return None
            refs.append(ref)
        seq = self.live[seq_id] = Sequence(seq_id, prompt, refs)
        return seq

    def finish(self, seq_id: int) -> None:
        seq = self.live.pop(seq_id, None)
        if seq is None:
            return
        for ref in seq.pages:
            self.source.put_away(ref)
        seq.pages.clear()

    def fork(self, parent: Sequence, child_id: int, copy) -> Sequence | None:
        if child_id in self.live:
            return None
        child = Sequence(child_id, parent.tokens)
        for theirs in parent.pages:
            mine = self.source.draw()  # leak: the pages of a half made child go nowhere when memory ends
            if mine is None:
                return None
            copy(theirs.physical, mine.physical)
            child.pages.append(mine)
        self.live[child_id] = child
        return child

    def compact(self, seq: Sequence, copy) -> int:
        """Moves pages to lower addresses."""
        moved = 0
        for i, old in enumerate(seq.pages):
            new = self.source.draw()  # leak: a page that lies higher is left where it is and not put away
            if new is None:
                break
            if new.physical >= old.physical:
                continue
            copy(old.physical, new.physical)
            seq.pages[i] = new
            self.source.put_away(old)
            moved += 1
        return moved

    def scratch_score(self, score) -> float:
        ref = self.source.draw()  # clean: put away after the use
        if ref is None:
            return 0.0
        value = score(ref.physical)
        self.source.put_away(ref)
        return value


def preload(region: Region, fill, count: int) -> int:
    filled = 0
    for _ in range(count):
        block = region.lift_block()  # leak: filled and not lowered any more
        if block is None:
            break
        fill(block.base, PAGES_PER_BLOCK)
        filled += 1
    return filled


def scrub(region: Region, zero) -> int:
    lifted: list[Block] = []
    while (block := region.lift_block()) is not None:  # clean: near miss, all are lowered after the pass
        zero(block.base, PAGES_PER_BLOCK)
        lifted.append(block)
    for block in lifted:
        region.lower_block(block)
    return len(lifted)
