import heapq
import itertools
import threading


class DriveLibrary:
    def __init__(self, drives):
        self.drives = list(drives)
        self.queue = []
        self.seq = itertools.count()
        self.cv = threading.Condition()

    def mount(self, priority=5):
        ticket = (priority, next(self.seq))
        with self.cv:
            heapq.heappush(self.queue, ticket)
            while not self.drives or self.queue[0] != ticket:
                self.cv.wait()
            heapq.heappop(self.queue)
            return self.drives.pop()

    def dismount(self, drive):
        drive.rewind()
        with self.cv:
            self.drives.append(drive)
            self.cv.notify_all()


class BackupJob:
    def __init__(self, library, catalog):
        self.library = library
        self.catalog = catalog

    def write(self, tape, blocks):
        drive = self.library.mount()  # clean: dismounted in finally
        try:
            drive.load(tape)
            for block in blocks:
                drive.write(block)
            self.catalog.add(tape, len(blocks))
        finally:
            self.library.dismount(drive)

    def verify(self, tape):
        drive = self.library.mount(priority=1)  # leak: the first bad block returns False with the drive
        drive.load(tape)
        for expected in self.catalog.checksums(tape):
            if drive.read_checksum() != expected:
                return False
        self.library.dismount(drive)
        return True

    def copy(self, src, dst):
        reader = self.library.mount()  # clean: dismounted last
        writer = self.library.mount()  # clean: dismounted first
        reader.load(src)
        writer.load(dst)
        for block in reader:
            writer.write(block)
        self.library.dismount(writer)
        self.library.dismount(reader)

    def label(self, tapes):
        for tape in tapes:
            drive = self.library.mount(9)  # leak: labelled tapes continue without dismounting
            drive.load(tape)
            if drive.label():
                continue
            drive.write_label(tape)
            self.library.dismount(drive)
