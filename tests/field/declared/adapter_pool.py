"""Adapters that are kept by reference count, and the streams they are copied on."""
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional

import streamlib
from adapterhub import AdapterHub, NoAdapter

BASE = "base"


@dataclass
class Call:
    call_id: str
    adapter: Any
    counted: bool = False
    stream: Optional[Any] = None


class AdapterTracker:
    def __init__(self, hub: AdapterHub) -> None:
        self._hub = hub
        self._calls: Dict[str, Call] = {}
        self._warm: List[Any] = []
        self._current: Optional[Any] = None

    def begin(self, call: Call) -> None:
        if call.call_id in self._calls:
            return
        if call.adapter.name != BASE:
            self._hub.retain_ref(call.adapter)  # clean: near miss, counted tells end which calls have a reference
            call.counted = True
        self._calls[call.call_id] = call

    def end(self, call_id: str) -> None:
        call = self._calls.pop(call_id, None)
        if call is None:
            return
        if call.counted:
            self._hub.drop_ref(call.adapter)

    def activate(self, adapter: Any) -> None:
        if self._current is adapter:
            return
        self._hub.retain_ref(adapter)  # clean: near miss, the reference on the adapter before it is dropped
        if self._current is not None:
            self._hub.drop_ref(self._current)
        self._current = adapter

    def activate_by_name(self, name: str) -> bool:
        adapter = self._hub.find(name)
        self._hub.retain_ref(adapter)  # leak: a second reference stays when the adapter is the current one
        if adapter is self._current:
            return False
        if self._current is not None:
            self._hub.drop_ref(self._current)
        self._current = adapter
        return True

    def keep_warm(self, adapters: List[Any], limit: int) -> None:
        for adapter in adapters:
            self._hub.retain_ref(adapter)  # leak: over the limit the adapter is neither listed nor dropped
            if len(self._warm) < limit:
                self._warm.append(adapter)

    def close(self) -> None:
        for call_id in list(self._calls):
            self.end(call_id)
        while self._warm:
            self._hub.drop_ref(self._warm.pop())
        if self._current is not None:
            self._hub.drop_ref(self._current)
            self._current = None

    def run(self, adapter: Any, fn: Callable[[Any], bytes]) -> bytes:
        self._hub.retain_ref(adapter)  # clean: near miss, the fallback rebinds another name and the adapter is dropped in the finally
        try:
            target = adapter
            if not adapter.ready:
                target = self._hub.find(BASE)
            return fn(target)
        finally:
            self._hub.drop_ref(adapter)

    def run_or_base(self, adapter: Any, fn: Callable[[Any], bytes]) -> bytes:
        self._hub.retain_ref(adapter)  # leak: after the fallback the reference of the base is dropped instead
        if not adapter.ready:
            adapter = self._hub.find(BASE)
        result = fn(adapter)
        self._hub.drop_ref(adapter)
        return result


class StreamSet:
    """Side streams for copies; one is kept, the others are lent a call at a time."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._kept: Optional[Any] = None

    def kept(self) -> Any:
        if self._kept is None:
            self._kept = streamlib.lend_stream(self._device)  # clean: kept until close
        return self._kept

    def _pick(self, own: bool) -> Any:
        """The kept stream, or one of its own, which the caller returns."""
        if not own:
            return self.kept()
        return streamlib.lend_stream(self._device)  # clean: handed to the caller

    def copy(self, tensor: Any, own: bool) -> Any:
        stream = self._pick(own)  # clean: near miss, returned under the flag with which it was picked
        copied = tensor.to(self._device, stream=stream)
        if own:
            streamlib.return_stream(stream)
        return copied

    def copy_large(self, tensor: Any) -> Any:
        stream = self._pick(own=True)  # leak: returned only when the copy had to be split
        chunks = tensor.split(1 << 20)
        copied = [chunk.to(self._device, stream=stream) for chunk in chunks]
        if len(copied) > 1:
            streamlib.return_stream(stream)
        return copied

    @contextmanager
    def private(self) -> Iterator[Any]:
        stream = streamlib.lend_stream(self._device)  # clean: returned in the finally after the yield
        try:
            yield stream
        finally:
            streamlib.return_stream(stream)

    def close(self) -> None:
        if self._kept is not None:
            streamlib.return_stream(self._kept)
            self._kept = None


def install(hub: AdapterHub, streams: StreamSet, adapter: Any) -> bool:
    hub.retain_ref(adapter)  # leak: the handler returns without dropping the reference
    try:
        with streams.private() as stream:  # clean: the context manager returns the stream
            hub.upload(adapter, stream)
    except NoAdapter:
        return False
    hub.drop_ref(adapter)
    return True


def stage(hub: AdapterHub, broker: Any, call: Call, ready: bool) -> bool:
    hub.retain_ref(call.adapter)  # clean: near miss, dropped when the stage is not ready and at the end
    call.stream = broker.lend_stream(call.call_id)  # leak: when the stage is not ready only the reference is dropped and the field cleared
    if not ready:
        call.stream = None
        hub.drop_ref(call.adapter)
        return False
    hub.upload(call.adapter, call.stream)
    broker.return_stream(device=0, stream=call.stream)
    call.stream = None
    hub.drop_ref(call.adapter)
    return True


def touch(hub: AdapterHub, adapter: Any) -> None:
    with streamlib.stream_section(0) as stream:  # clean: lease returns it by itself
        hub.upload(adapter, stream)
