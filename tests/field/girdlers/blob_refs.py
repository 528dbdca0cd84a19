"""Content-addressed blob registry with reference counts; drafts, attachments and previews hold references."""
from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Callable, Optional

log = logging.getLogger("blobs")


class Blob:
    def __init__(self, digest: str, data: bytes) -> None:
        self.digest = digest
        self.data = data
        self.refs = 0


class BlobRegistry:
    """intern() and retain() add one reference and return the blob; drop() removes one."""

    def __init__(self) -> None:
        self._blobs: dict[str, Blob] = {}
        self.on_evict: list[Callable[[str], None]] = []

    def intern(self, data: bytes) -> Blob:
        digest = hashlib.sha1(data).hexdigest()
        blob = self._blobs.get(digest)
        if blob is None:
            blob = self._blobs[digest] = Blob(digest, data)
        blob.refs += 1
        return blob

    def retain(self, digest: str) -> Optional[Blob]:
        blob = self._blobs.get(digest)
        if blob is not None:
            blob.refs += 1
        return blob

    def drop(self, blob: Blob) -> None:
        blob.refs -= 1
        if blob.refs == 0:
            del self._blobs[blob.digest]
            for callback in self.on_evict:
                callback(blob.digest)

    def size_of(self, digest: str) -> int:
        blob = self.retain(digest)  # leak: returns the length without dropping the reference
        if blob is None:
            return 0
        return len(blob.data)

    def concat(self, digests: list[str]) -> Optional[Blob]:
        parts: list[Blob] = []
        for digest in digests:
            blob = self.retain(digest)  # clean: dropped on a missing part and after joining
            if blob is None:
                for held in parts:
                    self.drop(held)
                return None
            parts.append(blob)
        joined = self.intern(b"".join(p.data for p in parts))  # clean: handed to the caller
        for held in parts:
            self.drop(held)
        return joined


@dataclass
class Draft:
    id: int
    body: Optional[Blob] = None
    attachments: dict[str, Blob] = field(default_factory=dict)
    preview: Optional[Blob] = None


class DraftStore:
    def __init__(self, registry: BlobRegistry) -> None:
        self.registry = registry
        self.drafts: dict[int, Draft] = {}

    def create(self, draft_id: int) -> Draft:
        draft = self.drafts[draft_id] = Draft(draft_id)
        return draft

    def set_body(self, draft: Draft, text: str) -> None:
        blob = self.registry.intern(text.encode())  # clean: near miss, old one dropped, discard drops this
        if draft.body is not None:
            self.registry.drop(draft.body)
        draft.body = blob

    def attach(self, draft: Draft, name: str, data: bytes) -> str:
        blob = self.registry.intern(data)  # leak: an attachment of the same name is overwritten undropped
        draft.attachments[name] = blob
        return blob.digest

    def attach_existing(self, draft: Draft, name: str, digest: str) -> bool:
        if name in draft.attachments:
            return False
        blob = self.registry.retain(digest)  # clean: kept in attachments, detach and discard drop it
        if blob is None:
            return False
        draft.attachments[name] = blob
        return True

    def detach(self, draft: Draft, name: str) -> bool:
        blob = draft.attachments.pop(name, None)
        if blob is None:
            return False
        self.registry.drop(blob)
        return True

    def make_preview(self, draft: Draft, render: Callable[[bytes], bytes]) -> bool:
        if draft.body is None or draft.preview is not None:
            return False
        draft.preview = self.registry.intern(render(draft.body.data))  # leak: discard never drops the preview
        return True

    def discard(self, draft_id: int) -> None:
        draft = self.drafts.pop(draft_id, None)
        if draft is None:
            return
        if draft.body is not None:
            self.registry.drop(draft.body)
        for blob in draft.attachments.values():
            self.registry.drop(blob)
        draft.attachments.clear()


class Holder:
    """Base of things that own blobs for as long as they are open."""

    def __init__(self, registry: BlobRegistry) -> None:
        self.registry = registry
        self.owned: list[Blob] = []

    def own(self, digest: str) -> bool:
        blob = self.registry.retain(digest)  # clean: kept in owned, close drops all of it
        if blob is None:
            return False
        self.owned.append(blob)
        return True

    def close(self) -> None:
        while self.owned:
            self.registry.drop(self.owned.pop())


class Gallery(Holder):
    """A holder with a cover picture in addition."""

    def __init__(self, registry: BlobRegistry, cover: bytes) -> None:
        super().__init__(registry)
        self.cover = registry.intern(cover)  # clean: close of the subclass drops it

    def close(self) -> None:
        self.registry.drop(self.cover)
        super().close()


class Slideshow(Holder):
    def __init__(self, registry: BlobRegistry, digests: list[str], music: bytes) -> None:
        super().__init__(registry)
        for digest in digests:
            self.own(digest)
        self.music = registry.intern(music)  # leak: close of the base knows only owned, not the music
        self.position = 0

    def show(self) -> bytes:
        blob = self.owned[self.position % len(self.owned)]
        self.position += 1
        return blob.data


def replace_blob(registry: BlobRegistry, table: dict[str, Blob], name: str, data: bytes) -> bool:
    """Puts new content under a name of the table; the table owns one reference per name."""
    fresh = registry.intern(data)  # leak: for equal content the second reference is not dropped
    current = table.get(name)
    if current is fresh:
        log.debug("%s is unchanged", name)
        return False
    table[name] = fresh
    if current is not None:
        registry.drop(current)
    return True


def swap_blob(registry: BlobRegistry, table: dict[str, Blob], name: str, data: bytes) -> bool:
    fresh = registry.intern(data)  # clean: near miss, kept in the table or dropped when unchanged
    current = table.pop(name, None)
    table[name] = fresh
    if current is not None:
        registry.drop(current)
    return current is not fresh


def clear_table(registry: BlobRegistry, table: dict[str, Blob]) -> None:
    for name in list(table):
        registry.drop(table.pop(name))


def digest_of_all(registry: BlobRegistry, digests: list[str]) -> str:
    joined = registry.concat(digests)  # leak: only the digest of the joined blob is used
    return joined.digest if joined is not None else ""
