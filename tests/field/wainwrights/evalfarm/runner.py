import logging
import queue
import threading

from .jobs import BadSample, Job, JobTable, Status
from .leases import LeaseBook, LeaseExpired, NoReplica, ResultSlots

log = logging.getLogger("evalfarm")


class Runner:
    def __init__(self, book: LeaseBook, slots: ResultSlots, ask, workers=4):
        self.book, self.slots, self.ask = book, slots, ask
        self.table = JobTable(book, slots)
        self.todo = queue.Queue()
        self.paused = {}
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]

    def start(self):
        for t in self.threads:
            t.start()

    def submit(self, job):
        self.table.jobs[job.name] = job
        self.todo.put(job)

    def _work(self):
        while not self.stop.is_set():
            try:
                job = self.todo.get(timeout=1.0)
            except queue.Empty:
                continue
            got = job.gather(self.book, self.slots)  # leak: a pause keeps the sink in the job, and after resume() this round overwrites it
            if got is None:
                self.todo.put(job)
                continue
            job.lease, job.sink = got
            self._run(job)

    def _run(self, job: Job):
        job.status = Status.RUNNING
        try:
            while job.position < len(job.samples):
                if job.name in self.paused:
                    job.status = Status.PAUSED
                    job.lease.surrender()
                    job.lease = None
                    self.paused[job.name] = job
                    return
                sample = job.samples[job.position]
                answer = self.ask(job.lease.check(), sample["prompt"])
                job.scores.append(job.score(sample, answer))
                job.write({"id": job.position, "answer": answer, "score": job.scores[-1]})
                job.position += 1
            job.status = Status.DONE
        except LeaseExpired:
            self._renew(job)
            return
        except BadSample as exc:
            log.error("%s: %s", job.name, exc)
            job.status = Status.FAILED
        job.relinquish(self.slots)

    def _renew(self, job):
        try:
            job.lease = self.book.renew(job.lease)  # clean: near miss, the old lease is void and the new one takes its place in the job
        except LeaseExpired:
            job.relinquish(self.slots)
            self.todo.put(job)
            return
        self._run(job)

    def pause(self, name):
        self.paused.setdefault(name, None)

    def resume(self, name):
        job = self.paused.pop(name, None)
        if job is not None:
            self.todo.put(job)

    def _word(self, lease):
        word = self.ask(lease.check(), "Say a word.")
        if not word.strip():
            raise BadSample("mute")
        return word

    def smoke(self, models):
        out = {}
        for model in models:
            try:
                lease = self.book.lease(model, wait=0.1)  # leak: BadSample of _word() breaks out of the loop before the surrender
            except NoReplica:
                continue
            try:
                out[model] = self._word(lease)
            except BadSample as exc:
                log.error("%s: %s", model, exc)
                break
            lease.surrender()
        return out

    def quick(self, models, prompt):
        lease = self.book.lease_any(models)  # clean: near miss, None is no lease and the finally surrenders
        if lease is None:
            return None
        try:
            return self.ask(lease.check(), prompt)
        finally:
            lease.surrender()

    def note(self, text):
        with self.slots.appending("notes.txt") as fh:  # clean: context manager
            fh.write(text.rstrip() + "\n")

    def summary(self):
        fh = self.slots.open("summary.json")  # clean: None is refused and done() follows in the finally
        if fh is None:
            return False
        try:
            for job in self.table.jobs.values():
                fh.write("%s %s %s\n" % (job.name, job.status.name, sum(job.scores) / max(1, len(job.scores))))
        finally:
            self.slots.done(fh)
        return True
