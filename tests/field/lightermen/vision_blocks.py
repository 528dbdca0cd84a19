"""KV blocks for image prefixes, shared between requests by reference counts."""
from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional, Tuple


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    digest: Optional[str] = None
    tokens: List[int] = field(default_factory=list)


class BlockPool:
    """new_block() and touch() each give one reference, which deref() ends."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue: Deque[Block] = deque(self.blocks)
        self.by_digest: Dict[str, Block] = {}

    def num_free(self) -> int:
        return len(self.free_queue)

    def new_block(self) -> Optional[Block]:
        if not self.free_queue:
            return None
        block = self.free_queue.popleft()
        if block.digest is not None:
            self.by_digest.pop(block.digest, None)
            block.digest = None
        block.tokens.clear()
        block.ref_cnt = 1
        return block

    def touch(self, digest: str) -> Optional[Block]:
        block = self.by_digest.get(digest)
        if block is None:
            return None
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
        block.ref_cnt += 1
        return block

    def deref(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            self.free_queue.append(block)

    def deref_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.deref(block)

    def publish(self, block: Block, digest: str) -> None:
        if digest not in self.by_digest:
            block.digest = digest
            self.by_digest[digest] = block

    def new_blocks(self, count: int) -> Optional[List[Block]]:
        if count > self.num_free():
            return None
        out: List[Block] = []
        for _ in range(count):
            block = self.new_block()  # clean: near miss, the count was checked, the list is the caller's
            if block is not None:
                out.append(block)
        return out

    def clone_block(self, src: Block) -> Optional[Block]:
        """Copy on write. The reference to src ends here when a copy was made."""
        dst = self.new_block()  # clean: handed to the caller
        if dst is None:
            return None
        dst.tokens.extend(src.tokens)
        self.deref(src)
        return dst


def chain(parent: str, image_hash: str, index: int) -> str:
    return hashlib.blake2b(f"{parent}/{image_hash}/{index}".encode(), digest_size=16).hexdigest()


@dataclass
class VisionRequest:
    rid: str
    image_hash: str
    num_tokens: int
    blocks: List[Block] = field(default_factory=list)
    draft: List[Block] = field(default_factory=list)


class PrefixManager:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.active: Dict[str, VisionRequest] = {}

    def match(self, image_hash: str, num_tokens: int) -> List[Block]:
        """The longest run of cached blocks, each with a reference for the caller."""
        found: List[Block] = []
        digest = ""
        for i in range(num_tokens // self.pool.block_size):
            digest = chain(digest, image_hash, i)
            block = self.pool.touch(digest)  # clean: handed to the caller in the list
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, req: VisionRequest) -> bool:
        need = -(-req.num_tokens // self.pool.block_size)
        cached = self.match(req.image_hash, req.num_tokens)  # clean: deref on refusal, else the request's
        fresh = self.pool.new_blocks(need - len(cached))  # clean: the request's, ended by release
        if fresh is None:
            self.pool.deref_all(cached)
            return False
        req.blocks = cached + fresh
        self.active[req.rid] = req
        return True

    def admit_partial(self, req: VisionRequest, least: float) -> bool:
        """Admits only requests of which enough is cached already."""
        cached = self.match(req.image_hash, req.num_tokens)  # leak: too little cached returns without deref
        if len(cached) * self.pool.block_size < least * req.num_tokens:
            return False
        need = -(-req.num_tokens // self.pool.block_size)
        fresh = self.pool.new_blocks(need - len(cached))  # clean: the request's, ended by release
        if fresh is None:
            self.pool.deref_all(cached)
            return False
        req.blocks = cached + fresh
        self.active[req.rid] = req
        return True

    def hit_ratio(self, image_hash: str, num_tokens: int) -> float:
        cached = self.match(image_hash, num_tokens)  # leak: counted and dropped with all references
        return len(cached) * self.pool.block_size / max(num_tokens, 1)

    def grow(self, req: VisionRequest, extra: int) -> bool:
        room = len(req.blocks) * self.pool.block_size - req.num_tokens
        while room < extra:
            block = self.pool.new_block()  # clean: near miss, in req.blocks also when the loop gives up
            if block is None:
                return False
            req.blocks.append(block)
            room += self.pool.block_size
        req.num_tokens += extra
        return True

    def draft(self, req: VisionRequest, count: int) -> bool:
        """Blocks for speculative tokens; verify() keeps some of them."""
        got = self.pool.new_blocks(count)  # leak: verify drops the blocks past the accepted ones
        if got is None:
            return False
        req.draft.extend(got)
        return True

    def verify(self, req: VisionRequest, accepted: int) -> None:
        req.blocks.extend(req.draft[:accepted])
        req.draft = []

    def unshare(self, req: VisionRequest, index: int) -> bool:
        block = req.blocks[index]
        if block.ref_cnt == 1:
            return True
        copy = self.pool.clone_block(block)  # clean: takes the place of the old one, whose reference ended
        if copy is None:
            return False
        req.blocks[index] = copy
        return True

    def fork(self, req: VisionRequest, rid: str) -> Optional[VisionRequest]:
        """A second request on the same prefix, for beam search."""
        child = VisionRequest(rid, req.image_hash, req.num_tokens)
        for block in req.blocks:
            if block.digest is None:
                continue
            shared = self.pool.touch(block.digest)  # clean: near miss, in the child, ended by release
            if shared is not None:
                child.blocks.append(shared)
        tail = self.pool.new_block()  # clean: in the child, or None and the others are ended
        if tail is None:
            self.pool.deref_all(child.blocks)
            return None
        child.blocks.append(tail)
        self.active[rid] = child
        return child

    def release(self, rid: str) -> None:
        req = self.active.pop(rid, None)
        if req is None:
            return
        for block in reversed(req.blocks):
            self.pool.deref(block)
        req.blocks.clear()


def share_system_image(mgr: PrefixManager, digests: List[str], into: List[VisionRequest]) -> int:
    """Puts the blocks of a system picture in front of several requests."""
    shared = 0
    for req in into:
        head: List[Block] = []
        for d in digests:
            block = mgr.pool.touch(d)  # leak: an incomplete head is dropped by the break and `continue`
            if block is None:
                break
            head.append(block)
        if len(head) < len(digests):
            continue
        req.blocks[:0] = head
        shared += 1
    return shared


def evict_probe(pool: BlockPool, want: int) -> Tuple[int, bool]:
    """Finds out whether `want` blocks can be had, by having them."""
    got: List[Block] = []
    for _ in range(want):
        block = pool.new_block()  # clean: all dereferenced below
        if block is None:
            break
        got.append(block)
    n = len(got)
    while got:
        pool.deref(got.pop())
    return n, n == want
