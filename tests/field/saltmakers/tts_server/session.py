"""A conversation: utterances wait in a queue until the client has played them."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Optional

import torch

from .arenas import MelSlab, Voice, VoiceShelf
from .stages import Stages


@dataclass
class Utterance:
    text: str
    voice: Voice
    slab: MelSlab
    played: int = 0


class SpeechSession:
    def __init__(self, stages: Stages, shelf: VoiceShelf, voice_name: str):
        self.stages = stages
        self.shelf = shelf
        self.voice_name = voice_name
        self.queue: deque[Utterance] = deque()
        self.prefetched: dict[str, MelSlab] = {}

    def say(self, text: str) -> bool:
        voice = self.shelf.hold(self.voice_name)  # clean: near miss, unheld when there is no slab and else by retire()
        if voice is None:
            return False
        slab = self.prefetched.pop(text, None)
        if slab is None:
            slab = self.stages.synth_mel(text, voice)  # clean: moved to the utterance in the queue
        if slab is None:
            self.shelf.unhold(voice)
            return False
        self.queue.append(Utterance(text, voice, slab))
        return True

    def prefetch(self, text: str, voice: Voice) -> None:
        slab = self.stages.synth_mel(text, voice)  # leak: dropped when the text is prefetched already
        if slab is None or text in self.prefetched:
            return
        self.prefetched[text] = slab

    def retire(self, utt: Utterance) -> None:
        utt.slab.done()
        self.shelf.unhold(utt.voice)

    def play(self) -> Optional[torch.Tensor]:
        if not self.queue:
            return None
        utt = self.queue.popleft()
        wav = self.stages.vocode(utt.slab)
        self.retire(utt)
        return wav

    def barge_in(self) -> int:
        n = len(self.queue)
        while self.queue:
            self.retire(self.queue.pop())
        return n

    def revoice(self, utt: Utterance, name: str) -> bool:
        """Says a waiting utterance in another voice."""
        voice = self.shelf.hold(name)  # leak: no slab for the new voice returns with it held
        if voice is None:
            return False
        slab = self.stages.synth_mel(utt.text, voice)  # clean: near miss, takes the place of the utterance's slab, which is done
        if slab is None:
            return False
        utt.slab.done()
        self.shelf.unhold(utt.voice)
        utt.slab, utt.voice = slab, voice
        return True

    def close(self) -> None:
        self.barge_in()
        for slab in self.prefetched.values():
            slab.done()
        self.prefetched.clear()
