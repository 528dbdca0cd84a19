"""Request handlers."""
from __future__ import annotations

import logging
from typing import Iterable, Optional

import torch

from .arenas import Gate, VoiceShelf
from .session import SpeechSession
from .stages import Stages

logger = logging.getLogger(__name__)


class TooBusy(Exception):
    pass


class SpeechServer:
    def __init__(self, stages: Stages, shelf: VoiceShelf, gate: Gate):
        self.stages = stages
        self.shelf = shelf
        self.gate = gate
        self.sessions: dict[str, SpeechSession] = {}

    def speak(self, text: str, voice_name: str, rate: float = 1.0) -> Optional[torch.Tensor]:
        if not self.gate.come_in():  # clean: out in finally
            raise TooBusy()
        voice = None
        try:
            voice = self.shelf.hold(voice_name)  # clean: near miss, unheld in finally when there is one
            if voice is None:
                return None
            slab = self.stages.synth_mel(text, voice)  # clean: stretch takes it over
            if slab is None:
                return None
            slab = self.stages.stretch(slab, rate)  # clean: done after the vocoder
            wav = self.stages.vocode(slab)
            slab.done()
            return wav
        finally:
            if voice is not None:
                self.shelf.unhold(voice)
            self.gate.go_out()

    def speak_lines(self, lines: Iterable[str], voice_name: str) -> list[torch.Tensor]:
        voice = self.shelf.hold(voice_name)  # clean: unheld after the loop
        if voice is None:
            return []
        wavs: list[torch.Tensor] = []
        for line in lines:
            slab = self.stages.synth_mel(line, voice)  # leak: lines that come out too short continue without done
            if slab is None:
                break
            if slab.frames < 16:
                logger.debug("line %r is too short", line)
                continue
            wavs.append(self.stages.vocode(slab))
            slab.done()
        self.shelf.unhold(voice)
        return wavs

    def open_session(self, sid: str, voice_name: str) -> bool:
        if not self.gate.come_in():  # leak: a session that exists already returns False and the place is not given back
            return False
        if sid in self.sessions:
            return False
        self.sessions[sid] = SpeechSession(self.stages, self.shelf, voice_name)
        return True

    def close_session(self, sid: str) -> None:
        self.sessions.pop(sid).close()
        self.gate.go_out()
