from .blocks import RefCountedBlocks


class PrefixCache:
    def __init__(self, size):
        self.blocks = RefCountedBlocks(size)
        self.by_hash = {}
        self.owned = {}

    def lookup(self, seq, hashes):
        """Pin as long a prefix as is known; the sequence drops it in forget()."""
        if seq in self.owned:
            return self.owned[seq]
        held = []
        for h in hashes:
            block = self.by_hash.get(h)
            if block is None:
                break
            self.blocks.incref(block)  # clean: near miss, kept in owned and dropped by forget
            held.append(block)
        self.owned[seq] = held
        return held

    def forget(self, seq):
        for block in self.owned.pop(seq, []):
            self.blocks.decref(block)

    def longest_match(self, hashes, minimum):
        matched = []
        for h in hashes:
            block = self.by_hash.get(h)
            if block is None:
                break
            self.blocks.incref(block)  # leak: too short a match returns with the references up
            matched.append(block)
        if len(matched) < minimum:
            return 0
        n = len(matched)
        for block in matched:
            self.blocks.decref(block)
        return n

    def peek(self, h, reader):
        block = self.by_hash.get(h)
        if block is None:
            return None
        self.blocks.incref(block)  # clean: near miss, decref in finally
        try:
            return reader(block)
        finally:
            self.blocks.decref(block)

    def compare(self, left, right, reader):
        self.blocks.incref(left)  # clean: dropped below
        self.blocks.incref(right)  # leak: left is dropped twice, right never
        same = reader(left) == reader(right)
        self.blocks.decref(left)
        self.blocks.decref(left)
        return same
