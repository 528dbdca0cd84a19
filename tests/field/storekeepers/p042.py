import random


class Worker:
    def __init__(self, wid):
        self.wid = wid
        self.load = 0


class WorkerPool:
    def __init__(self, count):
        self._members = [Worker(i) for i in range(count)]

    def hire(self, n):
        """Up to n workers as a list."""
        picked, self._members = self._members[:n], self._members[n:]
        return picked

    def dismiss(self, workers):
        self._members.extend(workers)


class Gang:
    def __init__(self, pool):
        self.pool = pool
        self.gangs = {}
        self.solo = {}
        self.seed = random.Random(7)

    def start(self, job, n):
        if job in self.gangs:
            return 0
        crew = self.pool.hire(n)  # leak: shrink keeps a slice and dismisses nobody
        self.gangs[job] = crew
        return len(crew)

    def shrink(self, job, n):
        crew = self.gangs[job]
        self.gangs[job] = crew[:n]
        return max(0, len(crew) - n)

    def finish(self, job):
        self.pool.dismiss(self.gangs.pop(job, []))

    def run_one(self, job, func):
        crew = self.pool.hire(1)  # clean: dismissed below
        result = func(crew[0]) if crew else None
        self.pool.dismiss(crew)
        return result

    def attach(self, job):
        if job not in self.solo:
            self.solo[job] = self.pool.hire(1)  # clean: detach dismisses it
        return len(self.solo[job])

    def detach(self, job):
        self.pool.dismiss(self.solo.pop(job, []))


class Election:
    def __init__(self, pool):
        self.pool = pool
        self.candidates = []
        self.leader = None

    def nominate(self, n):
        self.candidates += self.pool.hire(n)  # leak: resign dismisses the leader and forgets the others

    def vote(self):
        if self.candidates:
            self.leader = random.choice(self.candidates)
        return self.leader

    def resign(self):
        if self.leader is not None:
            self.pool.dismiss([self.leader])
        self.leader = None
        self.candidates = []
