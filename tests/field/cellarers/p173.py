"""Thread team: members are reserved by count and dissolved as a whole."""
import threading
from queue import SimpleQueue


class Crew:
    def __init__(self, members):
        self.members = members

    def each(self, fn):
        for inbox in self.members:
            inbox.put(fn)


class CrewRoom:
    def __init__(self, threads):
        self.idle = []
        self.cv = threading.Condition()
        for _ in range(threads):
            inbox = SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), daemon=True).start()
            self.idle.append(inbox)

    @staticmethod
    def _work(inbox):
        while (fn := inbox.get()) is not None:
            fn()

    def assemble(self, n):
        with self.cv:
            self.cv.wait_for(lambda: len(self.idle) >= n)
            crew, self.idle = self.idle[:n], self.idle[n:]
        return Crew(crew)

    def dissolve(self, crew):
        with self.cv:
            self.idle.extend(crew.members)
            crew.members = []
            self.cv.notify_all()


class Indexer:
    def __init__(self, room):
        self.room = room
        self.standing = None

    def open(self):
        self.standing = self.room.assemble(2)  # clean: kept, dissolved by close()

    def close(self):
        self.room.dissolve(self.standing)

    def rebuild(self, shards, build):
        crew = self.room.assemble(len(shards))  # clean: dissolved in finally
        try:
            crew.each(build)
        finally:
            self.room.dissolve(crew)

    def merge(self, segments, merge_one):
        crew = self.room.assemble(4)  # leak: too few segments return with the crew assembled
        if len(segments) < 2:
            return False
        crew.each(merge_one)
        self.room.dissolve(crew)
        return True

    def warm(self, fn):
        self.room.assemble(1).each(fn)  # leak: the crew of one is dropped
