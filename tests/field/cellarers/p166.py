import os
from dataclasses import dataclass


@dataclass
class Reservation:
    quota: "DiskQuota"
    size: int
    done: bool = False

    def commit(self, actual):
        self.cancel()
        self.quota.used += actual

    def cancel(self):
        if not self.done:
            self.done = True
            self.quota.reserved -= self.size


class DiskQuota:
    def __init__(self, limit):
        self.limit = limit
        self.used = 0
        self.reserved = 0

    def reserve(self, size):
        if self.used + self.reserved + size > self.limit:
            return None
        self.reserved += size
        return Reservation(self, size)


def save(quota, path, data):
    r = quota.reserve(len(data))  # clean: committed, or cancelled after an error
    if r is None:
        return False
    try:
        with open(path, "wb") as f:
            f.write(data)
    except OSError:
        r.cancel()
        return False
    r.commit(len(data))
    return True


def save_new(quota, path, data):
    r = quota.reserve(len(data))  # leak: a file already there returns with the bytes reserved
    if r is None or os.path.exists(path):
        return False
    with open(path, "wb") as f:
        r.commit(f.write(data))
    return True


def fits(quota, sizes):
    for size in sizes:
        r = quota.reserve(size)  # leak: every reservation of the check stays open
        if r is None:
            return False
    return True


def room_for(quota, size):
    r = quota.reserve(size)  # clean: cancelled where granted
    if r is None:
        return False
    r.cancel()
    return True
