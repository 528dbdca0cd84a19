"""Tokenised shards on disk."""
import os


class ShardWriter:
    def __init__(self, root, tokenizer, arena):
        self.root = root
        self.tokenizer = tokenizer
        self.arena = arena
        self.n = 0

    def write(self, docs):
        path = os.path.join(self.root, f"{self.n:06d}.bin")
        with open(path, "wb") as f:  # clean: with statement
            while docs:
                doc = docs.pop()
                f.write(self.tokenizer.encode(self.arena.load(doc.ext)))
                self.arena.fill_in(doc.ext)
        self.n += 1
        return path

    def pad(self, doc, n):
        ext = self.arena.recarve(doc.ext, n)  # clean: near miss, takes the old one's place in the document
        if ext is None:
            return False
        doc.ext = ext
        return True

    def append_raw(self, path, blobs):
        f = open(path, "ab")  # leak: an empty blob returns with the file open
        for b in blobs:
            if not b:
                return False
            f.write(b)
        f.close()
        return True
