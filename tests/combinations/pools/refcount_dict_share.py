# take: P.adopt(key)
# give: P.abandon(X)
# gets: optional
# type: HashedBlocks
class HashedBlocks:
    """Content-addressed blocks: the same hash gets the same block again.

    Blocks nobody uses wait in `_evictable` (insertion order) with their hash still valid.
    """

    def __init__(self, capacity):
        self._blank = list(range(capacity))
        self._block_of = {}  # hash -> block
        self._hash_of = {}  # block -> hash
        self._refs = {}  # block -> count, only blocks in use
        self._evictable = {}  # block -> None

    def adopt(self, digest):
        block = self._block_of.get(digest)
        if block is None:
            if self._blank:
                block = self._blank.pop()
            elif self._evictable:
                block = next(iter(self._evictable))
                del self._evictable[block]
                del self._block_of[self._hash_of.pop(block)]
            else:
                return None
            self._block_of[digest] = block
            self._hash_of[block] = digest
        self._evictable.pop(block, None)
        self._refs[block] = self._refs.get(block, 0) + 1
        return block

    def abandon(self, block):
        self._refs[block] -= 1
        if self._refs[block] == 0:
            del self._refs[block]
            self._evictable[block] = None
