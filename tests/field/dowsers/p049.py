"""Elastic group membership: ranks join and leave before each round."""
import threading


class RoundMembers:
    def __init__(self, capacity):
        self._capacity = capacity
        self._members = {}
        self._lock = threading.Lock()
        self.round = 0

    def join_round(self, name):
        with self._lock:
            if len(self._members) >= self._capacity:
                return None
            taken = set(self._members.values())
            rank = next(r for r in range(self._capacity) if r not in taken)
            self._members[name] = rank
            return rank

    def leave_round(self, name):
        with self._lock:
            self._members.pop(name, None)
            if not self._members:
                self.round += 1


class ElasticWorker:
    def __init__(self, name, members: RoundMembers, trainer):
        self.name = name
        self.members = members
        self.trainer = trainer

    def run_round(self, batch):
        rank = self.members.join_round(self.name)  # clean: leaves in finally
        if rank is None:
            return False
        try:
            self.trainer.step(rank, batch)
            return True
        finally:
            self.members.leave_round(self.name)

    def run_if_ready(self, batch):
        rank = self.members.join_round(self.name)  # leak: not ready, returns as a member
        if rank is None:
            return False
        if not self.trainer.ready():
            return False
        self.trainer.step(rank, batch)
        self.members.leave_round(self.name)
        return True

    def follow(self, batches):
        for batch in batches:
            rank = self.members.join_round(self.name)  # leak: break on the last batch skips leaving
            if rank is None:
                continue
            self.trainer.step(rank, batch)
            if batch.last:
                break
            self.members.leave_round(self.name)

    def enter(self):
        self.rank = self.members.join_round(self.name)  # clean: exit() leaves the round
        return self.rank is not None

    def exit(self):
        self.members.leave_round(self.name)
