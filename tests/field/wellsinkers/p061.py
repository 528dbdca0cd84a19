"""Jobs claimed by status rows in a list: claimed, then completed or failed."""
PENDING, CLAIMED, DONE, FAILED = "pending", "claimed", "done", "failed"
_jobs = []


def add_job(name, **args):
    _jobs.append({"name": name, "args": args, "status": PENDING, "tries": 0})


def claim_next(kind=None):
    for job in _jobs:
        if job["status"] == PENDING and kind in (None, job["name"]):
            job["status"] = CLAIMED
            return job
    return None


def complete(job):
    job["status"] = DONE


def fail(job, again=True):
    job["tries"] += 1
    job["status"] = PENDING if again and job["tries"] < 3 else FAILED


def run_next(handlers):
    job = claim_next()  # clean: completed or failed
    if job is None:
        return False
    ok = handlers[job["name"]](**job["args"])
    if ok:
        complete(job)
    else:
        fail(job)
    return True


def run_known(handlers):
    job = claim_next()  # leak: an unknown kind stays claimed
    if job is None:
        return False
    handler = handlers.get(job["name"])
    if handler is None:
        return False
    handler(**job["args"])
    complete(job)
    return True


class Worker:
    def __init__(self, kind):
        self.kind = kind
        self.job = None

    def take(self):
        self.job = claim_next(self.kind)  # clean: stored, completed by settle

    def settle(self, ok):
        complete(self.job) if ok else fail(self.job)
        self.job = None


def flush_kind(kind, handler):
    while (job := claim_next(kind)) is not None:  # leak: jobs the handler skips stay claimed
        if handler(**job["args"]) == "skip":
            continue
        complete(job)
