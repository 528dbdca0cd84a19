from retrieval.handles import HandleTable


class ShardReader:
    def __init__(self, table: HandleTable, root: str):
        self.table = table
        self.root = root
        self.current = None
        self.shard = -1

    def seek(self, shard: int) -> bool:
        if self.shard == shard:
            return True
        h = self.table.open_shard(shard, f"{self.root}/{shard}")  # clean: near miss, the previous is closed and close() ends the last
        if h is None:
            return False
        if self.current is not None:
            self.table.close_shard(self.current)
        self.current, self.shard = h, shard
        return True

    def close(self) -> None:
        if self.current is not None:
            self.table.close_shard(self.current)
            self.current, self.shard = None, -1

    def __enter__(self):
        return self

    def __exit__(self, *a):
        self.close()


class PairReader:
    def __init__(self, table: HandleTable, root: str, a: int, b: int):
        self.table = table
        self.left = table.open_shard(a, f"{root}/{a}")  # clean: close() closes it first
        self.right = table.open_shard(b, f"{root}/{b}")  # leak: close() returns before it when the left was not read

    def close(self):
        self.table.close_shard(self.left)
        if self.left.size() == 0:
            return
        self.table.close_shard(self.right)


def open_many(table: HandleTable, root: str, shards):
    """All or none."""
    got = []
    for s in shards:
        h = table.open_shard(s, f"{root}/{s}")  # clean: near miss, a failure closes what was opened
        if h is None:
            for g in got:
                table.close_shard(g)
            return None
        got.append(h)
    return got


def open_some(table: HandleTable, root: str, shards):
    out = {}
    for s in shards:
        h = table.open_shard(s, f"{root}/{s}")  # clean: the dict goes to the caller
        if h is not None:
            out[s] = h
    return out
