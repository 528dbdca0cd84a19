"""Prefix cache: reference counted blocks shared between requests."""
from dataclasses import dataclass, field


@dataclass
class Block:
    bid: int
    refs: int = 0
    digest: int = 0
    tokens: tuple = ()


class BlockStore:
    def __init__(self, count, block_size):
        self.block_size = block_size
        self._blocks = [Block(i) for i in range(count)]
        self._free = list(range(count - 1, -1, -1))
        self._by_digest = {}

    def new_block(self, tokens):
        if not self._free:
            return None
        block = self._blocks[self._free.pop()]  # clean: returned with one reference
        block.refs = 1
        block.tokens = tuple(tokens)
        return block

    def seal(self, block, digest):
        block.digest = digest
        self._by_digest[digest] = block.bid

    def lookup(self, digest):
        """Returns the block with a reference added, or None."""
        bid = self._by_digest.get(digest)
        if bid is None:
            return None
        return self.ref(self._blocks[bid])  # clean: the reference is the one that the caller gets

    def ref(self, block):
        block.refs += 1
        return block

    def unref(self, block):
        block.refs -= 1
        if block.refs == 0:
            self._by_digest.pop(block.digest, None)
            self._free.append(block.bid)


@dataclass
class Req:
    rid: int
    tokens: list
    blocks: list = field(default_factory=list)
    tail: Block = None


class PrefixCache:
    def __init__(self, store):
        self._store = store
        self._pinned = {}

    def _digests(self, tokens):
        size = self._store.block_size
        h = 0
        for i in range(0, len(tokens) - size + 1, size):
            h = hash((h, tuple(tokens[i : i + size])))
            yield i, h

    def match(self, tokens):
        hit = []
        for i, digest in self._digests(tokens):
            block = self._store.lookup(digest)  # clean: near miss, collected for the caller, a collision is unreferenced first
            if block is None:
                break
            if block.tokens != tuple(tokens[i : i + self._store.block_size]):
                self._store.unref(block)
                break
            hit.append(block)
        return hit

    def attach(self, req):
        req.blocks = self.match(req.tokens)  # clean: near miss, the request keeps them until detach
        for i, digest in list(self._digests(req.tokens))[len(req.blocks) :]:
            chunk = req.tokens[i : i + self._store.block_size]
            block = self._store.new_block(chunk)  # clean: near miss, joins the blocks of the request, which a failure detaches
            if block is None:
                self.detach(req)
                return False
            self._store.seal(block, digest)
            req.blocks.append(block)
        return True

    def hit_rate(self, tokens):
        matched = len(self.match(tokens))  # leak: the references are counted and never removed
        return matched * self._store.block_size / max(1, len(tokens))

    def hit_rate_exact(self, tokens):
        blocks = self.match(tokens)  # clean: all unreferenced after counting
        for block in blocks:
            self._store.unref(block)
        return len(blocks) * self._store.block_size / max(1, len(tokens))

    def grow_tail(self, req, token):
        if req.tail is None or len(req.tail.tokens) == self._store.block_size:
            req.tail = self._store.new_block([token])  # leak: a full tail is replaced without joining the blocks
            return req.tail is not None
        req.tail.tokens += (token,)
        return True

    def share_tail(self, src, dst):
        if src.tail is None or dst.tail is not None:
            return False
        dst.tail = self._store.ref(src.tail)  # clean: near miss, only set where there was none and detached later
        return True

    def detach(self, req):
        for block in req.blocks:
            self._store.unref(block)
        req.blocks = []
        if req.tail is not None:
            self._store.unref(req.tail)
            req.tail = None

    def pin(self, name, tokens):
        if name in self._pinned:
            return len(self._pinned[name])
        self._pinned[name] = self.match(tokens)  # clean: near miss, guarded against a second pin and undone by unpin
        return len(self._pinned[name])

    def repin(self, name, tokens):
        before = len(self._pinned.get(name, ()))
        self._pinned[name] = self.match(tokens)  # leak: takes the place of the blocks pinned under the name
        return len(self._pinned[name]) - before

    def unpin(self, name):
        for block in self._pinned.pop(name, ()):
            self._store.unref(block)


def common_prefix(cache, store, a, b):
    left = cache.match(a)  # leak: the early return for no overlap forgets these
    right = cache.match(b)  # leak: the early return for no overlap forgets these
    n = 0
    for x, y in zip(left, right):
        if x.bid != y.bid:
            break
        n += 1
    if n == 0:
        return []
    for block in left + right:
        store.unref(block)
    return [blk.bid for blk in left[:n]]


def longest(cache, store, prompts):
    best = []
    for tokens in prompts:
        blocks = cache.match(tokens)  # clean: near miss, the loser of each comparison is unreferenced
        if len(blocks) > len(best):
            best, blocks = blocks, best
        for block in blocks:
            store.unref(block)
    n = len(best)
    for block in best:
        store.unref(block)
    return n
