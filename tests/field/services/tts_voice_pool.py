"""Text-to-speech: vocoder sessions and output rings, freed by callbacks from the audio thread."""
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Callable, Dict, List, Optional

import torch

logger = logging.getLogger("tts")


class Vocoder:
    def __init__(self, hop: int) -> None:
        self.hop = hop
        self.state = torch.zeros(hop)

    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        return mel.repeat_interleave(self.hop) + self.state.mean()


class VocoderPool:
    def __init__(self, n: int, hop: int = 256) -> None:
        self._ready: List[Vocoder] = [Vocoder(hop) for _ in range(n)]
        self._lock = threading.Lock()

    def hire(self) -> Optional[Vocoder]:
        with self._lock:
            return self._ready.pop() if self._ready else None  # clean: handed out

    def dismiss(self, v: Vocoder) -> None:
        v.state.zero_()
        with self._lock:
            self._ready.append(v)


class AudioThread:
    def __init__(self) -> None:
        self.queue: List[Any] = []

    def play(self, pcm: torch.Tensor, done: Callable[[], None]) -> None:
        self.queue.append((pcm, done))

    def run_pending(self) -> None:
        while self.queue:
            _, done = self.queue.pop(0)
            done()


class BaseVoice(ABC):
    def __init__(self, pool: VocoderPool, out: AudioThread) -> None:
        self.pool = pool
        self.out = out
        self.voc: Optional[Vocoder] = None

    @abstractmethod
    def say(self, mel: torch.Tensor) -> bool: ...

    def open(self) -> bool:
        if self.voc is None:
            self.voc = self.pool.hire()  # clean: close() dismisses
        return self.voc is not None

    def close(self) -> None:
        if self.voc is not None:
            self.pool.dismiss(self.voc)
            self.voc = None


class StickyVoice(BaseVoice):
    def say(self, mel: torch.Tensor) -> bool:
        if not self.open():  # clean: the voice keeps its vocoder until close()
            return False
        assert self.voc is not None
        self.out.play(self.voc(mel), lambda: None)
        return True

    def reopen(self) -> bool:
        self.close()
        return self.open()  # clean: near miss, closed before


class PerCallVoice(BaseVoice):
    def say(self, mel: torch.Tensor) -> bool:
        voc = self.pool.hire()  # clean: near miss, the audio thread's callback dismisses it
        if voc is None:
            return False
        self.out.play(voc(mel), partial(self.pool.dismiss, voc))
        return True

    def say_loud(self, mel: torch.Tensor, gain: float) -> bool:
        voc = self.pool.hire()  # leak: silent audio is not played, so no callback ever dismisses it
        if voc is None:
            return False
        pcm = voc(mel) * gain
        if pcm.abs().max() < 1e-5:
            return False
        self.out.play(pcm, partial(self.pool.dismiss, voc))
        return True

    def say_log(self, mel: torch.Tensor) -> bool:
        voc = self.pool.hire()  # leak: the callback only logs
        if voc is None:
            return False
        self.out.play(voc(mel), lambda: logger.debug("played by %r", voc))
        return True


class GuestVoice(BaseVoice):
    """Closed by the collector."""

    def __init__(self, pool: VocoderPool, out: AudioThread) -> None:
        super().__init__(pool, out)
        self.second = pool.hire()  # clean: near miss, a finalizer over it is set where it was got
        if self.second is not None:
            weakref.finalize(self, pool.dismiss, self.second)

    def say(self, mel: torch.Tensor) -> bool:
        if self.second is None:
            return False
        self.out.play(self.second(mel), lambda: None)
        return True


class DuetVoice(BaseVoice):
    def __init__(self, pool: VocoderPool, out: AudioThread) -> None:
        super().__init__(pool, out)
        self.other: Optional[Vocoder] = None

    def open(self) -> bool:
        if not super().open():  # clean: close() of the base is inherited
            return False
        if self.other is None:
            self.other = self.pool.hire()  # leak: the inherited close() knows nothing of the second vocoder
        return self.other is not None

    def say(self, mel: torch.Tensor) -> bool:
        if self.voc is None or self.other is None:
            return False
        self.out.play(self.voc(mel) + self.other(mel), lambda: None)
        return True


class Studio:
    def __init__(self, pool: VocoderPool, out: AudioThread) -> None:
        self.pool = pool
        self.out = out
        self.booked: Dict[str, Vocoder] = {}

    def book(self, who: str) -> bool:
        if who in self.booked:
            return True
        voc = self.pool.hire()  # clean: in the book, unbook() dismisses
        if voc is None:
            return False
        self.booked[who] = voc
        return True

    def unbook(self, who: str) -> None:
        voc = self.booked.pop(who, None)
        if voc is not None:
            self.pool.dismiss(voc)

    def close(self) -> None:
        for who in list(self.booked):
            self.unbook(who)

    def render(self, mels: List[torch.Tensor]) -> List[torch.Tensor]:
        voc = self.pool.hire()  # leak: an empty mel raises without dismiss
        if voc is None:
            return []
        out: List[torch.Tensor] = []
        for mel in mels:
            if mel.numel() == 0:
                raise ValueError("empty mel")
            out.append(voc(mel))
        self.pool.dismiss(voc)
        return out

    def once(self, mel: torch.Tensor) -> Optional[torch.Tensor]:
        voice = StickyVoice(self.pool, self.out)
        if not voice.say(mel):  # leak: the local voice keeps a vocoder and is not closed
            return None
        return mel

    def once_closed(self, mel: torch.Tensor) -> bool:
        voice = StickyVoice(self.pool, self.out)
        try:
            return voice.say(mel)  # clean: closed in finally
        finally:
            voice.close()

    def duration(self, mel: torch.Tensor) -> int:
        voc = self.pool.hire() or Vocoder(256)  # leak: the hired one is used for the count and dropped
        return voc(mel).numel()
