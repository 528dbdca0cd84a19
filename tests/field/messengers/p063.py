"""Migration of virtual disks between two volume groups."""
import logging

log = logging.getLogger("migrate")


class Extent:
    def __init__(self, group, start):
        self.group = group
        self.start = start


class VolumeGroup:
    def __init__(self, name, count):
        self.name = name
        self._free = list(range(count))

    def grab(self):
        if not self._free:
            return None
        return Extent(self, self._free.pop())

    def drop(self, extent):
        self._free.append(extent.start)


def grab_from(groups):
    for group in groups:
        extent = group.grab()  # clean: handed to the caller
        if extent is not None:
            return extent
    return None


def drop(extent):
    extent.group.drop(extent)


class Disk:
    def __init__(self, name):
        self.name = name
        self.extents = []

    def grow(self, groups, count):
        added = 0
        while added < count:
            extent = grab_from(groups)  # clean: listed in the disk
            if extent is None:
                break
            self.extents.append(extent)
            added += 1
        return added

    def destroy(self):
        while self.extents:
            drop(self.extents.pop())


def migrate(disk, target, copier):
    moved = 0
    for i, old in enumerate(disk.extents):
        fresh = grab_from([target])  # leak: a failed copy keeps the old one and goes on
        if fresh is None:
            return moved
        if not copier.copy(old, fresh):
            log.warning("extent %d of %s stays", i, disk.name)
            continue
        disk.extents[i] = fresh
        drop(old)
        moved += 1
    return moved


def swap_extent(disk, index, target, copier):
    fresh = grab_from([target])  # clean: one of the two is dropped
    if fresh is None:
        return False
    old = disk.extents[index]
    good = copier.copy(old, fresh)
    if good:
        disk.extents[index], fresh = fresh, old
    drop(fresh)
    return good


def has_space(groups):
    return bool(grab_from(groups))  # leak: turned into a truth value
