"""Inode cache with reference counts, in the way of a small Unix."""


class Inode:
    __slots__ = ("dev", "inum", "ref", "valid", "size")

    def __init__(self):
        self.dev = self.inum = self.ref = self.size = 0
        self.valid = False


class InodeCache:
    def __init__(self, disk, n=50):
        self.disk = disk
        self.table = [Inode() for _ in range(n)]

    def iget(self, dev, inum):
        empty = None
        for ip in self.table:
            if ip.ref > 0 and (ip.dev, ip.inum) == (dev, inum):
                ip.ref += 1
                return ip
            if empty is None and ip.ref == 0:
                empty = ip
        if empty is None:
            raise RuntimeError("iget: no inodes")
        empty.dev, empty.inum, empty.ref, empty.valid = dev, inum, 1, False
        return empty

    def iput(self, ip):
        if ip.ref == 1 and ip.valid:
            self.disk.write_inode(ip)
        ip.ref -= 1


class Fs:
    def __init__(self, cache, disk):
        self.cache = cache
        self.disk = disk

    def namei(self, path):
        ip = self.cache.iget(1, 1)  # clean: put for the next step, or handed to the caller
        for name in filter(None, path.split("/")):
            inum = self.disk.dirlookup(ip, name)
            self.cache.iput(ip)
            if inum == 0:
                return None
            ip = self.cache.iget(1, inum)  # clean: put for the next step, or handed to the caller
        return ip

    def size(self, path):
        ip = self.namei(path)  # clean: put unless None
        if ip is None:
            return -1
        n = ip.size
        self.cache.iput(ip)
        return n

    def truncate(self, path):
        ip = self.namei(path)  # leak: an inode already empty is not put
        if ip is None:
            return False
        if ip.size == 0:
            return True
        ip.size = 0
        self.cache.iput(ip)
        return True

    def exists(self, path):
        return self.namei(path) is not None  # leak: a found inode keeps its reference
