"""Gradient buckets: open, then seal for the reducer or abandon."""
from dataclasses import dataclass, field


@dataclass
class Bucket:
    number: int
    capacity: int
    grads: list = field(default_factory=list)


class BucketFactory:
    def __init__(self, max_open, capacity):
        self.max_open = max_open
        self.capacity = capacity
        self.opened = {}
        self.sealed = []
        self._n = 0

    def open_bucket(self):
        if len(self.opened) >= self.max_open:
            raise RuntimeError("too many open buckets")
        self._n += 1
        bucket = Bucket(self._n, self.capacity)
        self.opened[bucket.number] = bucket
        return bucket

    def seal(self, bucket):
        del self.opened[bucket.number]
        self.sealed.append(bucket)

    def abandon(self, bucket):
        self.opened.pop(bucket.number)


class DdpHook:
    def __init__(self, factory: BucketFactory, reducer):
        self.factory = factory
        self.reducer = reducer

    def reduce_params(self, params):
        bucket = self.factory.open_bucket()  # clean: sealed or abandoned
        bucket.grads.extend(p.grad for p in params if p.grad is not None)
        if bucket.grads:
            self.factory.seal(bucket)
        else:
            self.factory.abandon(bucket)

    def reduce_one(self, p):
        bucket = self.factory.open_bucket()  # leak: no gradient, neither sealed nor abandoned
        if p.grad is None:
            return False
        bucket.grads.append(p.grad)
        self.factory.seal(bucket)
        return True

    def start(self):
        self.bucket = self.factory.open_bucket()  # clean: flush() seals it

    def flush(self):
        self.factory.seal(self.bucket)
        self.bucket = None

    def rebuild(self, groups):
        for group in groups:
            bucket = self.factory.open_bucket()  # leak: break on overflow leaves the bucket open
            bucket.grads.extend(group)
            if len(bucket.grads) > bucket.capacity:
                break
            self.factory.seal(bucket)
