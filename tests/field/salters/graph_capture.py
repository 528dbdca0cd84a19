"""CUDA graph capture: side streams, events and static input buffers per batch size."""
from __future__ import annotations

import bisect
from contextlib import contextmanager
from typing import Any, Callable, Dict, Generic, List, Optional, Tuple, TypeVar

import torch

T = TypeVar("T")


class FreeList(Generic[T]):
    """Reuses objects that are expensive to make."""

    def __init__(self, factory: Callable[[], T], limit: int) -> None:
        self._factory = factory
        self._limit = limit
        self._made = 0
        self._ready: List[T] = []

    def pull(self) -> T:
        if self._ready:
            return self._ready.pop()
        if self._made >= self._limit:
            raise RuntimeError("free list exhausted")
        self._made += 1
        return self._factory()

    def push(self, item: T) -> None:
        self._ready.append(item)

    def idle(self) -> int:
        return len(self._ready)


class StaticInputs:
    def __init__(self, batch: int, hidden: int) -> None:
        self.batch = batch
        self.tokens = torch.zeros(batch, dtype=torch.int64)
        self.hidden = torch.zeros(batch, hidden)


class InputArena:
    def __init__(self, sizes: List[int], hidden: int, copies: int = 2) -> None:
        self.sizes = sorted(sizes)
        self._slots: Dict[int, List[StaticInputs]] = {
            s: [StaticInputs(s, hidden) for _ in range(copies)] for s in self.sizes
        }

    def round_up(self, batch: int) -> Optional[int]:
        i = bisect.bisect_left(self.sizes, batch)
        return self.sizes[i] if i < len(self.sizes) else None

    def grab(self, batch: int) -> Optional[StaticInputs]:
        size = self.round_up(batch)
        if size is None or not self._slots[size]:
            return None
        return self._slots[size].pop()

    def ungrab(self, inputs: StaticInputs) -> None:
        self._slots[inputs.batch].append(inputs)

    @contextmanager
    def grabbed(self, batch: int):
        inputs = self.grab(batch)  # clean: put back in the finally
        try:
            yield inputs
        finally:
            if inputs is not None:
                self.ungrab(inputs)


class EventGuard:
    """Records an event on entry and waits for it on exit."""

    def __init__(self, events: FreeList, stream: Any, skip_wait: bool = False) -> None:
        self.events = events
        self.stream = stream
        self.skip_wait = skip_wait
        self.event: Any = None

    def __enter__(self) -> Any:
        self.event = self.events.pull()  # leak: __exit__ returns before the push when skip_wait is set
        self.event.record(self.stream)
        return self.event

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.skip_wait:
            return False
        self.event.synchronize()
        self.events.push(self.event)
        return False


class StreamGuard:
    def __init__(self, streams: FreeList) -> None:
        self.streams = streams
        self.stream: Any = None
        self.failed = False

    def __enter__(self) -> Any:
        self.stream = self.streams.pull()  # clean: near miss, the push comes before the early return
        return self.stream

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.streams.push(self.stream)
        if exc_type is None:
            return False
        self.failed = True
        return False


class GraphRunner:
    def __init__(self, model: Any, arena: InputArena, streams: FreeList, events: FreeList) -> None:
        self.model = model
        self.arena = arena
        self.streams = streams
        self.events = events
        self.graphs: Dict[int, Tuple[Any, StaticInputs]] = {}
        self._last_event: Any = None
        self._timers: List[Tuple[Any, Any]] = []

    def capture(self, batch: int) -> bool:
        inputs = self.arena.grab(batch)  # leak: a size that is captured already returns True past it
        if inputs is None:
            return False
        if inputs.batch in self.graphs:
            return True
        with StreamGuard(self.streams) as side:  # clean: the guard pushes the stream back
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                self.model(inputs.tokens, inputs.hidden)
        self.graphs[inputs.batch] = (graph, inputs)
        return True

    def recapture(self, batch: int) -> bool:
        size = self.arena.round_up(batch)
        if size is None:
            return False
        old = self.graphs.pop(size, None)
        if old is not None:
            self.arena.ungrab(old[1])
        inputs = self.arena.grab(size)  # clean: filed with its graph, reset() puts it back
        if inputs is None:
            return False
        graph = torch.cuda.CUDAGraph()
        self.graphs[size] = (graph, inputs)
        return True

    def reset(self) -> None:
        for _, inputs in self.graphs.values():
            self.arena.ungrab(inputs)
        self.graphs.clear()

    def replay(self, tokens: List[int]) -> Optional[torch.Tensor]:
        size = self.arena.round_up(len(tokens))
        if size not in self.graphs:
            return self.eager(tokens)
        graph, inputs = self.graphs[size]
        inputs.tokens[:len(tokens)] = torch.tensor(tokens)
        graph.replay()
        return inputs.hidden[:len(tokens)].clone()

    def eager(self, tokens: List[int]) -> Optional[torch.Tensor]:
        with self.arena.grabbed(len(tokens)) as inputs:  # clean: near miss, returns go through the manager
            if inputs is None:
                return None
            inputs.tokens[:len(tokens)] = torch.tensor(tokens)
            return self.model(inputs.tokens, inputs.hidden).clone()

    def mark(self, stream: Any) -> None:
        """Remembers the point the copy stream has to wait for."""
        event = self.events.pull()  # leak: replaces the event of the mark before, which is not pushed
        event.record(stream)
        self._last_event = event

    def wait_mark(self, stream: Any) -> None:
        if self._last_event is None:
            return
        stream.wait_event(self._last_event)

    def start_timer(self, stream: Any) -> int:
        begin = self.events.pull()  # clean: near miss, collect_timers() pushes both of the pair
        end = self.events.pull()  # clean: as the one above
        begin.record(stream)
        self._timers.append((begin, end))
        return len(self._timers) - 1

    def stop_timer(self, index: int, stream: Any) -> None:
        self._timers[index][1].record(stream)

    def collect_timers(self) -> List[float]:
        out = []
        for begin, end in self._timers:
            end.synchronize()
            out.append(begin.elapsed_time(end))
            self.events.push(begin)
            self.events.push(end)
        self._timers.clear()
        return out

    def time_once(self, fn: Callable[[], None], stream: Any, verbose: bool = False) -> Optional[float]:
        begin = self.events.pull()  # leak: pushed back only when verbose
        begin.record(stream)
        fn()
        end = self.events.pull()  # clean: pushed back right after the synchronisation
        end.record(stream)
        end.synchronize()
        elapsed = begin.elapsed_time(end)
        self.events.push(end)
        if verbose:
            print(f"{elapsed:.3f} ms")
            self.events.push(begin)
        return elapsed

    def fan_out_detached(self, fns: List[Callable[[Any], None]]) -> List[Any]:
        """The lanes go to the caller, who waits for them and gives them to join()."""
        lanes: List[Any] = []
        for fn in fns:
            lane = self.streams.pull()  # clean: near miss, collected and handed to the caller
            fn(lane)
            lanes.append(lane)
        return lanes

    def join(self, lanes: List[Any]) -> None:
        while lanes:
            lane = lanes.pop()
            lane.synchronize()
            self.streams.push(lane)

    def run_layers(self, layers: List[Callable[[Any], None]]) -> None:
        lanes = self.fan_out_detached(layers)  # clean: joined
        self.join(lanes)

    def run_experts(self, experts: List[Callable[[Any], None]]) -> int:
        lanes = self.fan_out_detached(experts)  # leak: synchronised, but the lanes are never pushed back
        for lane in lanes:
            lane.synchronize()
        return len(lanes)

    def overlap(self, copy: Callable[[Any], None], compute: Callable[[], None]) -> None:
        use_side = self.streams.idle() > 0
        side = self.streams.pull() if use_side else None  # clean: near miss, the same flag pushes it back
        if use_side:
            copy(side)
        compute()
        if use_side:
            side.synchronize()
            self.streams.push(side)
