"""Reference counts on shared model shards in a serving host."""


class Shard:
    def __init__(self, name, weights):
        self.name = name
        self.weights = weights
        self.refs = 0


class ShardCache:
    def __init__(self, loader):
        self.loader = loader
        self.shards = {}

    def incref(self, name):
        shard = self.shards.get(name)
        if shard is None:
            shard = self.shards[name] = Shard(name, self.loader(name))
        shard.refs += 1
        return shard

    def decref(self, shard):
        shard.refs -= 1
        if shard.refs == 0:
            self.shards.pop(shard.name, None)


class Adapter:
    def __init__(self, shard, scale):
        self.shard = shard
        self.scale = scale

    def apply(self, x):
        return [v * self.scale * w for v, w in zip(x, self.shard.weights)]


class Host:
    def __init__(self, cache, allow):
        self.cache = cache
        self.allow = allow
        self.adapters = {}

    def shard_or_none(self, name):
        if name not in self.allow:
            return None
        return self.cache.incref(name)  # clean: handed to the caller

    def attach(self, name, scale):
        shard = self.shard_or_none(name)  # clean: owned by the adapter until detach
        if shard is None:
            return False
        old = self.adapters.pop(name, None)
        if old is not None:
            self.cache.decref(old.shard)
        self.adapters[name] = Adapter(shard, scale)
        return True

    def detach(self, name):
        adapter = self.adapters.pop(name, None)
        if adapter is not None:
            self.cache.decref(adapter.shard)

    def run_once(self, name, scale, x):
        shard = self.shard_or_none(name)  # clean: the adapter only borrows
        if shard is None:
            return x
        y = Adapter(shard, scale).apply(x)
        self.cache.decref(shard)
        return y

    def run_temporary(self, name, scale, x):
        shard = self.shard_or_none(name)  # leak: the adapter is dropped, nobody decrefs
        if shard is None:
            return x
        adapter = Adapter(shard, scale)
        return adapter.apply(x)

    def largest(self, names):
        best = 0
        for name in names:
            shard = self.shard_or_none(name)  # leak: only the last one is decref'd
            if shard is not None:
                best = max(best, len(shard.weights))
        if names and shard is not None:
            self.cache.decref(shard)
        return best
