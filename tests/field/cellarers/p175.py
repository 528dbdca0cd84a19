"""Tiles of a texture atlas, found in a two-dimensional map of used cells."""
import numpy as np


class Rect:
    def __init__(self, y, x, h, w):
        self.y, self.x, self.h, self.w = y, x, h, w

    def window(self):
        return slice(self.y, self.y + self.h), slice(self.x, self.x + self.w)


class Atlas:
    def __init__(self, rows, cols):
        self.used = np.zeros((rows, cols), dtype=np.uint8)

    def pack(self, h, w):
        rows, cols = self.used.shape
        for y in range(rows - h + 1):
            for x in range(cols - w + 1):
                rect = Rect(y, x, h, w)
                if not self.used[rect.window()].any():
                    self.used[rect.window()] = 1
                    return rect
        return None

    def unpack(self, rect):
        self.used[rect.window()] = 0


class GlyphCache:
    def __init__(self, atlas, font, pixels):
        self.atlas = atlas
        self.font = font
        self.pixels = pixels
        self.rects = {}

    def put(self, ch):
        bitmap = self.font.raster(ch)
        rect = self.atlas.pack(*bitmap.shape)  # clean: stored under the character, unpacked by evict()
        if rect is not None:
            self.rects[ch] = rect
            self.pixels[rect.window()] = bitmap

    def evict(self, ch):
        self.atlas.unpack(self.rects.pop(ch))

    def render_once(self, bitmap, blit):
        rect = self.atlas.pack(*bitmap.shape)  # clean: unpacked after the blit
        if rect is None:
            return
        self.pixels[rect.window()] = bitmap
        blit(rect)
        self.atlas.unpack(rect)

    def put_visible(self, ch):
        rect = self.atlas.pack(*self.font.box(ch))  # leak: a blank glyph returns with its cells used
        if rect is None:
            return False
        bitmap = self.font.raster(ch)
        if not bitmap.any():
            return False
        self.pixels[rect.window()] = bitmap
        self.rects[ch] = rect
        return True

    def fits(self, h, w):
        return self.atlas.pack(h, w) is not None  # leak: the test itself uses the cells
