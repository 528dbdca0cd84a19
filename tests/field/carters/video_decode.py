"""Frame extraction for video prompts: hardware decoder sessions and surface buffers."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence


class DecodeError(RuntimeError):
    pass


class Transient(DecodeError):
    pass


@dataclass
class Session:
    sid: int
    codec: str
    cursor: int = 0


@dataclass
class Surface:
    sid: int
    pts: int = -1
    luma: bytes = b""


class DecoderBoard:
    """The board has a few sessions and, over all of them, a few surfaces."""

    CODECS = ("h264", "hevc", "av1")

    def __init__(self, sessions: int, surfaces: int, flaky_every: int = 0) -> None:
        self._sessions = list(range(sessions))
        self._surfaces = [Surface(i) for i in range(surfaces)]
        self._flaky_every = flaky_every
        self._opened = 0

    def open_session(self, codec: str) -> Session:
        if codec not in self.CODECS:
            raise DecodeError(f"codec {codec}")
        if not self._sessions:
            raise Transient("no session")
        self._opened += 1
        return Session(self._sessions.pop(), codec)

    def close_session(self, session: Session) -> None:
        self._sessions.append(session.sid)

    def map_surface(self) -> Optional[Surface]:
        return self._surfaces.pop() if self._surfaces else None

    def unmap_surface(self, surface: Surface) -> None:
        surface.luma = b""
        self._surfaces.append(surface)

    def decode_into(self, session: Session, surface: Surface, clip: bytes) -> bool:
        """False at the end of the clip."""
        if session.cursor >= len(clip):
            return False
        if self._flaky_every and session.cursor and session.cursor % self._flaky_every == 0:
            self._flaky_every = 0
            raise Transient("bitstream resync")
        surface.pts = session.cursor
        surface.luma = clip[session.cursor : session.cursor + 4]
        session.cursor += 4
        return True

    @property
    def idle(self) -> tuple[int, int]:
        return len(self._sessions), len(self._surfaces)


class FrameSampler:
    def __init__(self, board: DecoderBoard) -> None:
        self.board = board

    def sample(self, clip: bytes, codec: str, every: int) -> list[bytes]:
        session = self.board.open_session(codec)  # clean: closed after the loop
        frames: list[bytes] = []
        index = 0
        while True:
            surface = self.board.map_surface()  # leak: the end of the clip breaks with a surface mapped
            if surface is None:
                break
            if not self.board.decode_into(session, surface, clip):
                break
            if index % every == 0:
                frames.append(surface.luma)
            index += 1
            self.board.unmap_surface(surface)
        self.board.close_session(session)
        return frames

    def keyframes(self, clip: bytes, codec: str, gap: int) -> list[bytes]:
        session = self.board.open_session(codec)  # clean: near miss, finally
        surface = None
        frames: list[bytes] = []
        try:
            surface = self.board.map_surface()  # clean: near miss, mapped once, finally unmaps it unless None
            if surface is None:
                return frames
            while self.board.decode_into(session, surface, clip):
                if surface.pts % gap:
                    continue
                frames.append(surface.luma)
        finally:
            if surface is not None:
                self.board.unmap_surface(surface)
            self.board.close_session(session)
        return frames

    def thumbnail(self, clip: bytes, codec: str) -> Optional[bytes]:
        session = self.board.open_session(codec)  # leak: no surface returns before close_session
        surface = self.board.map_surface()  # clean: unmapped after the decode
        if surface is None:
            return None
        ok = self.board.decode_into(session, surface, clip)
        image = surface.luma if ok else None
        self.board.unmap_surface(surface)
        self.board.close_session(session)
        return image

    def duration(self, clip: bytes, codec: str) -> int:
        try:
            session = self.board.open_session(codec)  # clean: near miss, the handler is only for the opening itself
        except DecodeError:
            return 0
        session.cursor = len(clip)
        frames = session.cursor // 4
        self.board.close_session(session)
        return frames

    def decode_resilient(self, clip: bytes, codec: str, attempts: int = 3) -> list[bytes]:
        for attempt in range(attempts):
            session = self.board.open_session(codec)  # leak: a Transient starts over with a new session, the old one stays open
            try:
                frames = list(self._pump(session, clip))
            except Transient:
                time.sleep(0.001 * attempt)
                continue
            self.board.close_session(session)
            return frames
        return []

    def decode_resumable(self, clip: bytes, codec: str, attempts: int = 3) -> list[bytes]:
        frames: list[bytes] = []
        cursor = 0
        for _ in range(attempts):
            session = self.board.open_session(codec)  # clean: near miss, continue in the handler runs finally first
            session.cursor = cursor
            try:
                for frame in self._pump(session, clip):
                    frames.append(frame)
                return frames
            except Transient:
                cursor = session.cursor
                continue
            finally:
                self.board.close_session(session)
        return frames

    def _pump(self, session: Session, clip: bytes) -> Iterator[bytes]:
        surface = self.board.map_surface()  # clean: finally in the generator
        if surface is None:
            return
        try:
            while self.board.decode_into(session, surface, clip):
                yield surface.luma
        finally:
            self.board.unmap_surface(surface)

    def open_any(self, codecs: Sequence[str]) -> Optional[Session]:
        """First codec the board takes; the caller closes the session."""
        for codec in codecs:
            try:
                return self.board.open_session(codec)  # clean: returned
            except DecodeError:
                continue
        return None

    def supports(self, codecs: Sequence[str]) -> bool:
        session = self.open_any(codecs)  # leak: opened for the test only
        return session is not None

    def first_codec(self, codecs: Sequence[str]) -> str:
        session = self.open_any(codecs)  # clean: closed, or None
        if session is None:
            return ""
        codec = session.codec
        self.board.close_session(session)
        return codec


class TemporalWindow:
    """Last n surfaces for the optical-flow head."""

    def __init__(self, board: DecoderBoard, size: int) -> None:
        self.board = board
        self.size = size
        self.window: list[Surface] = []

    def push(self, session: Session, clip: bytes) -> bool:
        surface = self.board.map_surface()  # clean: near miss, unmapped at the clip's end, else in the window until it slides out
        if surface is None:
            return False
        if not self.board.decode_into(session, surface, clip):
            self.board.unmap_surface(surface)
            return False
        self.window.append(surface)
        if len(self.window) > self.size:
            self.board.unmap_surface(self.window.pop(0))
        return True

    def flush(self) -> None:
        for surface in self.window:
            self.board.unmap_surface(surface)
        self.window = []


class SceneBuffer:
    def __init__(self, board: DecoderBoard) -> None:
        self.board = board
        self.scene: list[Surface] = []

    def push(self, session: Session, clip: bytes, cut: bool) -> bool:
        if cut:
            self.scene = []
        surface = self.board.map_surface()  # leak: a cut replaces the list with the surfaces in it
        if surface is None:
            return False
        if not self.board.decode_into(session, surface, clip):
            self.board.unmap_surface(surface)
            return False
        self.scene.append(surface)
        return True

    def close(self) -> None:
        while self.scene:
            self.board.unmap_surface(self.scene.pop())


def side_by_side(board: DecoderBoard, left: bytes, right: bytes, codec: str) -> Optional[bytes]:
    a = board.map_surface()  # clean: near miss, the arms tell which of the two has to go back
    b = board.map_surface()  # clean: the arms tell which of the two has to go back
    if a is None:
        if b is not None:
            board.unmap_surface(b)
        return None
    if b is None:
        board.unmap_surface(a)
        return None
    a.luma, b.luma = left[:4], right[:4]
    joined = a.luma + b.luma
    board.unmap_surface(a)
    board.unmap_surface(b)
    return joined


def main() -> None:
    board = DecoderBoard(2, 4, flaky_every=8)
    sampler = FrameSampler(board)
    clip = bytes(range(32))
    print(len(sampler.decode_resumable(clip, "h264")), len(sampler.keyframes(clip, "av1", 8)))
    print(sampler.duration(clip, "vp9"), sampler.first_codec(["vp9", "hevc"]), side_by_side(board, clip, clip, "av1"))
    session = board.open_session("av1")  # clean: closed below
    window = TemporalWindow(board, 2)
    while window.push(session, clip):
        pass
    window.flush()
    board.close_session(session)
    print("idle", board.idle)


if __name__ == "__main__":
    main()
