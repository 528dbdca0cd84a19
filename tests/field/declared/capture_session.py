"""Profiling helpers: process wide GPU captures and quiet clocks."""
from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

import gpuprof

log = logging.getLogger(__name__)


def profile_call(fn: Callable[[], Any], path: str) -> Any:
    gpuprof.begin_capture(path)  # clean: ended in the finally
    try:
        return fn()
    finally:
        gpuprof.end_capture()


def profile_steps(step: Callable[[int], float], steps: int, limit: float) -> List[float]:
    losses: List[float] = []
    gpuprof.begin_capture("steps")  # leak: the return at the limit skips the end of the capture
    for index in range(steps):
        loss = step(index)
        losses.append(loss)
        if loss > limit:
            log.warning("diverged at step %d", index)
            return losses
    gpuprof.end_capture()
    return losses


def profile_window(step: Callable[[int], float], first: int, last: int) -> float:
    """Capture the steps from first up to, not including, last."""
    if first >= last:
        return 0.0
    total = 0.0
    for index in range(last + 1):
        if index == first:
            gpuprof.begin_capture(f"window-{first}")  # clean: near miss, the loop always reaches last, where the capture ends
        elif index == last:
            gpuprof.end_capture()
            break
        total += step(index)
    return total


def profile_slow(step: Callable[[], float], budget: float, capture: bool) -> float:
    if capture:
        gpuprof.begin_capture("slow")  # leak: ended only when the step also is over the budget
    took = step()
    if capture and took > budget:
        gpuprof.end_capture()
    return took


def profile_maybe(step: Callable[[], float], capture: bool) -> float:
    if capture:
        gpuprof.begin_capture("maybe")  # clean: near miss, the same flag ends it
    took = step()
    if not capture:
        return took
    gpuprof.end_capture()
    return took


@contextmanager
def quiet_clocks(settle: float) -> Iterator[None]:
    gpuprof.mute_clocks()  # clean: unmuted in the finally
    try:
        time.sleep(settle)
        yield
    finally:
        gpuprof.unmute_clocks()


@contextmanager
def quiet_capture(path: str) -> Iterator[bool]:
    if gpuprof.busy():
        yield False
        return
    gpuprof.mute_clocks()  # leak: the finally only ends the capture
    gpuprof.begin_capture(path)  # clean: ended in the finally
    try:
        yield True
    finally:
        gpuprof.end_capture()


class StepProfiler:
    """Callback object for the trainer."""

    def __init__(self, every: int, length: int) -> None:
        self._every = every
        self._length = length
        self._active_since: Optional[int] = None
        self._muted = False
        self._reports: Dict[int, str] = {}

    def on_step_begin(self, step: int) -> None:
        if self._active_since is not None:
            return
        if step % self._every == 0:
            gpuprof.begin_capture(f"step-{step}")  # clean: near miss, on_step_end or close ends it while active_since is set
            self._active_since = step

    def on_step_end(self, step: int) -> None:
        if self._active_since is None:
            return
        if step - self._active_since >= self._length:
            self._finish(step)

    def _finish(self, step: int) -> None:
        gpuprof.end_capture()
        self._reports[step] = f"step-{self._active_since}"
        self._active_since = None

    def on_eval_begin(self) -> None:
        if not self._muted:
            gpuprof.mute_clocks()  # clean: on_eval_end or close unmutes while muted is set
            self._muted = True

    def on_eval_end(self) -> None:
        if self._muted:
            self._muted = False
            gpuprof.unmute_clocks()

    def close(self) -> None:
        if self._active_since is not None:
            self._finish(self._active_since)
        self.on_eval_end()


def benchmark(fn: Callable[[], int], rounds: int) -> List[float]:
    times: List[float] = []
    for _ in range(rounds):
        gpuprof.mute_clocks()  # leak: rounds that did no work go on with the clocks muted
        begun = time.perf_counter()
        if fn() == 0:
            continue
        times.append(time.perf_counter() - begun)
        gpuprof.unmute_clocks()
    return times


def benchmark_quiet(fn: Callable[[], int], rounds: int, path: Optional[str]) -> List[float]:
    times: List[float] = []
    with ExitStack() as stack:
        stack.enter_context(quiet_clocks(0.5))  # clean: the stack leaves it
        if path is not None:
            gpuprof.begin_capture(path)  # clean: near miss, the stack calls the end of the capture
            stack.callback(gpuprof.end_capture)
        for _ in range(rounds):
            begun = time.perf_counter()
            fn()
            times.append(time.perf_counter() - begun)
    return times


def warm_then_capture(fn: Callable[[], int], path: str) -> int:
    gpuprof.begin_capture("warmup")  # leak: a cold start returns from the handler while capturing
    try:
        fn()
    except TimeoutError:
        return -1
    gpuprof.end_capture()
    with gpuprof.capturing(path):  # clean: lease ends by itself
        return fn()
