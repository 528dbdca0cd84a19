"""Power budget in watts across the GPUs of a node, in a free-standing dict."""
import threading

state = {"watts": 5600, "grants": {}, "serial": 0}
_mu = threading.Lock()


def grant_power(gpu, watts):
    with _mu:
        if state["watts"] < watts:
            return 0
        state["watts"] -= watts
        state["serial"] += 1
        state["grants"][state["serial"]] = (gpu, watts)
        return state["serial"]


def revoke_power(grant):
    with _mu:
        _, watts = state["grants"].pop(grant)
        state["watts"] += watts


def boosted(gpu, fn):
    grant = grant_power(gpu, 200)  # clean: revoked in finally when there was one
    try:
        return fn(gpu)
    finally:
        if grant:
            revoke_power(grant)


def boost_if_hot(gpu, queue_len, fn):
    grant = grant_power(gpu, 150)  # leak: a short queue returns with the watts granted
    if not grant:
        return fn(gpu)
    if queue_len < 4:
        return fn(gpu)
    gpu.set_clock("max")
    out = fn(gpu)
    revoke_power(grant)
    return out


class Governor:
    def __init__(self, gpus):
        self.gpus = gpus
        self.current = {}

    def raise_clock(self, gpu):
        grant = grant_power(gpu, 100)  # clean: kept in current, lower_clock() revokes
        if grant:
            self.current[gpu] = grant
            gpu.set_clock("high")

    def lower_clock(self, gpu):
        gpu.set_clock("low")
        revoke_power(self.current.pop(gpu))

    def survey(self):
        can = []
        for gpu in self.gpus:
            if grant_power(gpu, 300):  # leak: used as a test, nothing revokes it
                can.append(gpu)
        return can
