"""Worker pods of a build farm, chosen by interchangeable policies."""
from typing import Protocol


class Pods:
    def __init__(self, names):
        self._cold = list(names)

    def start_pod(self):
        return self._cold.pop() if self._cold else None

    def stop_pod(self, name):
        self._cold.append(name)


class Policy(Protocol):
    def done(self, pods: Pods, pod: str, ok: bool) -> None: ...


class StopAlways:
    def done(self, pods, pod, ok):
        pods.stop_pod(pod)


class KeepWarm:
    def __init__(self, limit):
        self.limit = limit
        self.warm = []

    def done(self, pods, pod, ok):
        if ok and len(self.warm) < self.limit:
            self.warm.append(pod)
        else:
            pods.stop_pod(pod)

    def drain(self, pods):
        while self.warm:
            pods.stop_pod(self.warm.pop())


class StopIfOk:
    def __init__(self):
        self.bad = 0

    def done(self, pods, pod, ok):
        if ok:
            pods.stop_pod(pod)
        else:
            self.bad += 1


def started(pods, image, cluster):
    pod = pods.start_pod()  # clean: handed to the caller
    if pod is not None:
        cluster.load(pod, image)
    return pod


def build(pods, cluster, target):
    policy = StopAlways()
    pod = started(pods, "gcc", cluster)  # clean: StopAlways stops it
    if pod is None:
        return False
    policy.done(pods, pod, cluster.make(pod, target))
    return True


def build_all(pods, cluster, targets):
    policy = KeepWarm(2)
    built = []
    for target in targets:
        pod = policy.warm.pop() if policy.warm else started(pods, "gcc", cluster)  # clean: drained below
        if pod is None:
            break
        built.append(cluster.make(pod, target))
        policy.done(pods, pod, built[-1])
    policy.drain(pods)
    return built


def nightly(pods, cluster, target):
    policy = StopIfOk()
    pod = started(pods, "clang", cluster)  # leak: this policy does not stop a pod that failed
    if pod is not None:
        policy.done(pods, pod, cluster.make(pod, target))
    return policy.bad


def compiler_version(pods, cluster):
    return cluster.version(started(pods, "clang", cluster))  # leak: the version is asked for, the pod left
