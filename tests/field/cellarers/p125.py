"""Bounded set of open log files, made by a function that returns its two halves."""
import os


def make_log_pool(folder, limit):
    parked = []
    out = set()

    def get_log():
        if parked:
            f = parked.pop()
        elif len(out) < limit:
            f = open(os.path.join(folder, f"log.{len(out)}"), "a")
        else:
            return None
        out.add(f)
        return f

    def put_log(f):
        f.flush()
        out.remove(f)
        parked.append(f)

    return get_log, put_log


get_log, put_log = make_log_pool("/var/log/ingest", 16)


def record(event):
    log = get_log()  # clean: put back in finally
    if log is None:
        return False
    try:
        log.write(event.to_line())
        return True
    finally:
        put_log(log)


def record_batch(events, min_level):
    written = 0
    for event in events:
        log = get_log()  # leak: low events continue with the file taken out
        if log is None:
            break
        if event.level < min_level:
            continue
        log.write(event.to_line())
        put_log(log)
        written += 1
    return written


def mark_start(host):
    log = get_log()  # clean: put back where one was given
    if log is not None:
        log.write(f"start {host}\n")
        put_log(log)


def position():
    log = get_log()  # leak: the position is returned and the file stays out
    if log is None:
        return -1
    return log.tell()
