"""Worker seats of a batch scheduler, with subclasses for special queues."""
import collections


class SeatMap:
    def __init__(self, hosts):
        self._free = collections.deque(hosts)
        self.owner = {}

    def seat(self, job):
        host = self._free.popleft()
        self.owner[host] = job
        return host

    def unseat(self, host):
        del self.owner[host]
        self._free.append(host)


class Queue:
    def __init__(self, seats):
        self.seats = seats
        self.finished = []

    def acquire_host(self, job):
        return self.seats.seat(job)  # clean: handed to the caller

    def release_host(self, host, job):
        self.seats.unseat(host)

    def run(self, job):
        host = self.acquire_host(job)  # clean: unseated here
        code = job.execute(host)
        self.seats.unseat(host)
        self.finished.append((job.name, code))
        return code


class PreemptibleQueue(Queue):
    def acquire_host(self, job):
        for host, owner in list(self.seats.owner.items()):
            if owner.priority < job.priority:
                owner.suspend()
                self.seats.unseat(host)
                break
        return super().acquire_host(job)  # clean: handed to the caller


class AuditedQueue(Queue):
    def __init__(self, seats, journal):
        super().__init__(seats)
        self.journal = journal

    def release_host(self, host, job):
        self.journal.append((job.name, host))
        super().release_host(host, job)

    def replay(self, job):
        host = self.acquire_host(job)  # clean: the override calls the base
        self.journal.append(("replay", host))
        code = job.execute(host)
        self.release_host(host, job)
        return code


class StickyQueue(Queue):
    def __init__(self, seats):
        super().__init__(seats)
        self.last_host = {}

    def release_host(self, host, job):
        self.last_host[job.name] = str(host)

    def rerun(self, job, times):
        codes = []
        for _ in range(times):
            host = self.acquire_host(job)  # leak: this class's release_host does not unseat
            codes.append(job.execute(host))
            self.release_host(host, job)
        return codes


def drain(seats, jobs):
    queue = PreemptibleQueue(seats)
    for job in jobs:
        host = queue.acquire_host(job)  # leak: break on a failed job leaves the host seated
        if job.execute(host) != 0:
            break
        queue.release_host(host, job)
    return len(queue.finished)
