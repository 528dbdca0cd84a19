"""Prefill side: publishes KV frames and frees them on acknowledgement."""
from typing import Callable

from .ring import FrameRing, Segment


class Publisher:
    def __init__(self, frames: FrameRing, write: Callable[[Segment, bytes], None]) -> None:
        self.frames = frames
        self.write = write
        self.unacked: dict[str, list[Segment]] = {}
        self.meta: dict[str, Segment] = {}

    def publish(self, request_id: str, layers: list[bytes]) -> bool:
        mine = self.unacked.setdefault(request_id, [])
        for layer in layers:
            segment = self.frames.stake_frame(len(layer))  # clean: near miss, a refusal acknowledges those staked so far
            if segment is None:
                self.acknowledge(request_id)
                return False
            mine.append(segment)
            self.write(segment, layer)
        return True

    def publish_last(self, request_id: str, layer: bytes) -> bool:
        segment = self.frames.stake_frame(len(layer))  # leak: the new list replaces unacknowledged frames
        if segment is None:
            return False
        self.write(segment, layer)
        self.unacked[request_id] = [segment]
        return True

    def publish_meta(self, request_id: str, encode: Callable[[], bytes], limit: int) -> bool:
        if request_id in self.meta:
            return True
        segment = self.frames.stake_frame(limit)  # leak: an oversized encoding returns while staked
        if segment is None:
            return False
        blob = encode()
        if len(blob) > limit:
            return False
        self.write(segment, blob)
        self.meta[request_id] = segment
        return True

    def acknowledge(self, request_id: str) -> None:
        for segment in self.unacked.pop(request_id, []):
            self.frames.finish_frame(segment)
        meta = self.meta.pop(request_id, None)
        if meta is not None:
            self.frames.finish_frame(meta)
