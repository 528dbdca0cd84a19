"""Decoder contexts are expensive, so they are kept in a stable and hired out."""
from __future__ import annotations

import threading
from typing import Any, Optional


class DecoderContext:
    def __init__(self, ident: int, language: str) -> None:
        self.ident = ident
        self.language = language
        self.history: list[str] = []
        self.tainted = False

    def reset(self) -> None:
        self.history.clear()

    def feed(self, chunk: bytes) -> str:
        word = f"w{len(chunk)}"
        self.history.append(word)
        return word


class Stable:
    """Contexts by language; hire() and dismiss()."""

    def __init__(self, languages: list[str], each: int) -> None:
        self._idle = {lang: [DecoderContext(i, lang) for i in range(each)] for lang in languages}
        self._lock = threading.Lock()

    def hire(self, language: str) -> Optional[DecoderContext]:
        with self._lock:
            idle = self._idle.get(language)
            return idle.pop() if idle else None

    def dismiss(self, context: DecoderContext) -> None:
        context.reset()
        with self._lock:
            self._idle[context.language].append(context)

    def hire_first(self, languages: list[str]) -> Optional[DecoderContext]:
        """The first language of which there is an idle context."""
        for language in languages:
            context = self.hire(language)  # clean: near miss, nothing is held when the loop goes on
            if context is None:
                continue
            return context
        return None

    def hire_untainted(self, language: str, tries: int) -> Optional[DecoderContext]:
        for _ in range(tries):
            context = self.hire(language)  # leak: tainted contexts are passed over and not dismissed
            if context is None:
                return None
            if not context.tainted:
                return context
        return None


class Hired:
    """with Hired(stable, "en") as context: ..."""

    def __init__(self, stable: Stable, language: str) -> None:
        self.stable = stable
        self.language = language
        self.context: Optional[DecoderContext] = None

    def __enter__(self) -> Optional[DecoderContext]:
        self.context = self.stable.hire(self.language)  # clean: dismissed by the exit
        return self.context

    def __exit__(self, *exc: Any) -> bool:
        if self.context is not None:
            self.stable.dismiss(self.context)
            self.context = None
        return False


class Audited:
    """A hired context whose use is written into a log."""

    def __init__(self, stable: Stable, language: str, audit: list[str]) -> None:
        self.stable = stable
        self.language = language
        self.audit = audit
        self.context: Optional[DecoderContext] = None

    def __enter__(self) -> Optional[DecoderContext]:
        self.context = self.stable.hire(self.language)  # leak: the exit returns early when nothing was decoded
        return self.context

    def __exit__(self, *exc: Any) -> bool:
        if self.context is None:
            return False
        words = list(self.context.history)
        if not words:
            self.audit.append(f"{self.language}: silence")
            return False
        self.audit.append(f"{self.language}: {len(words)} words")
        self.stable.dismiss(self.context)
        self.context = None
        return False


class Tandem:
    """Two contexts, one for each channel of a call."""

    def __init__(self, stable: Stable) -> None:
        self.stable = stable
        self.left: Optional[DecoderContext] = None
        self.right: Optional[DecoderContext] = None

    def open(self, language: str) -> bool:
        left = self.stable.hire(language)  # clean: dismissed where there is no second one, else by close()
        if left is None:
            return False
        right = self.stable.hire(language)  # clean: kept until close()
        if right is None:
            self.stable.dismiss(left)
            return False
        self.left, self.right = left, right
        return True

    def close(self) -> None:
        for context in (self.left, self.right):
            if context is not None:
                self.stable.dismiss(context)
        self.left = self.right = None
