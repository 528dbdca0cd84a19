import uuid
from dataclasses import dataclass


@dataclass
class Job:
    payload: dict
    receipt: str = ""


class JobQueue:
    def __init__(self):
        self.visible = []
        self.invisible = {}

    def receive(self):
        if not self.visible:
            return None
        job = self.visible.pop(0)
        job.receipt = uuid.uuid4().hex
        self.invisible[job.receipt] = job
        return job

    def delete(self, job):
        self.invisible.pop(job.receipt)

    def make_visible(self, job):
        self.visible.append(self.invisible.pop(job.receipt))


def work_once(jobs, handlers):
    job = jobs.receive()  # clean: deleted or visible again
    if job is None:
        return
    handler = handlers.get(job.payload["type"])
    if handler is None:
        jobs.make_visible(job)
        return
    handler(job.payload)
    jobs.delete(job)


def work_until_empty(jobs, handle):
    while (job := jobs.receive()) is not None:  # leak: a failed job breaks out and stays invisible
        if not handle(job.payload):
            break
        jobs.delete(job)


def next_job(jobs, wanted):
    job = jobs.receive()  # clean: handed to the caller, or made visible again
    if job is not None and job.payload["type"] != wanted:
        jobs.make_visible(job)
        return None
    return job


def run_export(jobs, export):
    job = next_job(jobs, "export")  # clean: deleted once exported
    if job is not None:
        export(job.payload)
        jobs.delete(job)


def purge_tests(jobs):
    job = next_job(jobs, "test")  # leak: dry runs are returned as done without being deleted
    if job and not job.payload.get("dry"):
        jobs.delete(job)
    return job is not None
