"""Voices of a software synthesiser."""
import math


class VoiceBank:
    def __init__(self, count):
        self._silent = list(range(1, count + 1))
        self.gain = [0.0] * (count + 1)

    def note_on(self):
        if not self._silent:
            return None
        return self._silent.pop()

    def note_off(self, voice):
        self.gain[voice] = 0.0
        self._silent.append(voice)


class Synth:
    def __init__(self, bank):
        self.bank = bank
        self.sounding = {}
        self.allocators = {
            "poly": lambda key: bank.note_on(),  # clean: handed to whoever calls the lambda
            "steal": lambda key: self._steal() or bank.note_on(),  # clean: handed to the caller
        }
        self.mode = "poly"

    def _steal(self):
        oldest = next(iter(self.sounding), None)
        return self.sounding.pop(oldest, None)

    def _voice(self, key):
        return self.allocators[self.mode](key)  # clean: handed to the caller

    def press(self, key, velocity):
        if key in self.sounding:
            return False
        voice = self._voice(key)  # clean: sounding until the release
        if voice is None:
            return False
        self.bank.gain[voice] = velocity / 127
        self.sounding[key] = voice
        return True

    def release(self, key):
        voice = self.sounding.pop(key, None)
        if voice is not None:
            self.bank.note_off(voice)

    def ghost(self, velocity):
        voice = self.allocators["poly"](0)  # leak: a velocity below the gate returns
        if voice is None:
            return 0.0
        if velocity < 8:
            return 0.0
        self.bank.gain[voice] = velocity / 127
        level = 20 * math.log10(self.bank.gain[voice])
        self.bank.note_off(voice)
        return level

    def chord(self, keys):
        voices = {}
        for key in keys:
            voice = self._voice(key)  # leak: the voices so far are lost when one is refused
            if voice is None:
                return False
            voices[key] = voice
        self.sounding.update(voices)
        return True

    def click(self):
        voice = self.bank.note_on()  # clean: off at once
        if voice is not None:
            self.bank.gain[voice] = 1.0
            self.bank.note_off(voice)
