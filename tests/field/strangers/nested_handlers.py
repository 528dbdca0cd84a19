"""Mapping device memory with nested error handling."""
import errno
import logging

log = logging.getLogger(__name__)


class Mapping:
    def __init__(self, addr):
        self.addr = addr
        self.locked = False


class Mapper:
    def __init__(self):
        self.base = 0
        self.maps = {}

    def map_region(self, size):
        self.base += size
        mapping = Mapping(self.base)
        self.maps[mapping.addr] = mapping
        return mapping

    def unmap_region(self, mapping):
        self.maps.pop(mapping.addr, None)

    def lock_pages(self, mapping):
        if mapping.addr % 3 == 0:
            raise OSError(errno.ENOMEM, "can not lock")
        mapping.locked = True


def map_locked(mapper, size):
    mapping = mapper.map_region(size)  # clean: near miss, unmapped when locking fails, else returned
    try:
        mapper.lock_pages(mapping)
    except OSError as exc:
        mapper.unmap_region(mapping)
        if exc.errno == errno.ENOMEM:
            return None
        raise
    return mapping


def map_locked_or_plain(mapper, size):
    mapping = mapper.map_region(size)  # clean: near miss, the handler only logs because the mapping is returned all the same
    try:
        mapper.lock_pages(mapping)
    except OSError:
        log.info("not locked")
    return mapping


def copy_locked(mapper, data):
    mapping = map_locked(mapper, len(data))  # clean: near miss, none-checked, unmapped in finally
    if mapping is None:
        return 0
    try:
        return mapping.addr + len(data)
    finally:
        mapper.unmap_region(mapping)


def copy_plain(mapper, data):
    mapping = map_locked_or_plain(mapper, len(data))  # leak: unlocked mappings are refused and stay mapped
    if not mapping.locked:
        return 0
    try:
        return mapping.addr + len(data)
    finally:
        mapper.unmap_region(mapping)


def size_plain(mapper, data):
    mapping = map_locked_or_plain(mapper, len(data))  # clean: unmapped, locked or not
    addr = mapping.addr
    mapper.unmap_region(mapping)
    return addr


def probe_lock(mapper, size):
    mapping = mapper.map_region(size)  # leak: the handler answers False and keeps the mapping
    try:
        mapper.lock_pages(mapping)
    except OSError:
        return False
    mapper.unmap_region(mapping)
    return True


def probe_sizes(mapper, sizes):
    ok = []
    for size in sizes:
        mapping = mapper.map_region(size)  # clean: near miss, inner try swallows, outer finally unmaps
        try:
            try:
                mapper.lock_pages(mapping)
            except OSError:
                continue
            ok.append(size)
        finally:
            mapper.unmap_region(mapping)
    return ok


def probe_two(mapper, small, large):
    a = mapper.map_region(small)  # clean: near miss, the outer finally
    try:
        b = mapper.map_region(large)  # leak: the lock's error is swallowed by the outer handler past b's unmap
        mapper.lock_pages(b)
        mapper.unmap_region(b)
        return True
    except OSError:
        return False
    finally:
        mapper.unmap_region(a)
