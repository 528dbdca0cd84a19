"""Sharded slot table: the lease is a pair (shard, slot)."""
import threading


class _Shard:
    def __init__(self, count):
        self.lock = threading.Lock()
        self.free = list(range(count))


class ShardedSlots:
    def __init__(self, shards, per_shard):
        self._shards = [_Shard(per_shard) for _ in range(shards)]

    def allot(self, key):
        home = hash(key) % len(self._shards)
        for step in range(len(self._shards)):
            index = (home + step) % len(self._shards)
            shard = self._shards[index]
            with shard.lock:
                if shard.free:
                    return index, shard.free.pop()
        return None

    def deallot(self, lease):
        index, slot = lease
        shard = self._shards[index]
        with shard.lock:
            shard.free.append(slot)


class SessionTable:
    def __init__(self, slots: ShardedSlots):
        self.slots = slots
        self.sessions = {}

    def open(self, sid):
        lease = self.slots.allot(sid)  # leak: an existing session returns with a second slot
        if lease is None:
            return False
        if sid in self.sessions:
            return True
        self.sessions[sid] = lease
        return True

    def close(self, sid):
        lease = self.sessions.pop(sid, None)
        if lease is not None:
            self.slots.deallot(lease)

    def move(self, old, new):
        lease = self.slots.allot(new)  # clean: stored under the new id, close() gives it back
        if lease is not None:
            self.close(old)
            self.sessions[new] = lease

    def bench(self, keys, fn):
        for key in keys:
            lease = self.slots.allot(key)  # clean: deallotted in finally
            if lease is None:
                continue
            try:
                fn(*lease)
            finally:
                self.slots.deallot(lease)

    def shard_of(self, key):
        return self.slots.allot(key)[0]  # leak: only the shard number is kept
