class Voice:
    def __init__(self, number):
        self.number = number
        self.pitch = 0
        self.gain = 0.0


class VoicePool:
    def __init__(self, polyphony):
        self.silent = [Voice(i) for i in range(polyphony)]

    def key_on(self, pitch, gain):
        voice = self.silent.pop(0)
        voice.pitch, voice.gain = pitch, gain
        return voice

    def key_off(self, voice):
        voice.gain = 0.0
        self.silent.append(voice)


class Synth:
    def __init__(self, voices):
        self.voices = voices
        self.sounding = {}
        self.sustained = []
        self.pedal = False
        self.drone = None

    def note_on(self, pitch, velocity):
        if pitch in self.sounding:
            self.voices.key_off(self.sounding.pop(pitch))
        voice = self.voices.key_on(pitch, velocity / 127)  # leak: pedal_up skips the first one
        self.sounding[pitch] = voice

    def note_off(self, pitch):
        voice = self.sounding.pop(pitch, None)
        if voice is None:
            return
        if self.pedal:
            self.sustained.append(voice)
            return
        self.voices.key_off(voice)

    def pedal_down(self):
        self.pedal = True

    def pedal_up(self):
        self.pedal = False
        for voice in self.sustained[1:]:
            self.voices.key_off(voice)
        self.sustained.clear()

    def start_drone(self, pitch):
        if self.drone is None:
            self.drone = self.voices.key_on(pitch, 0.3)  # clean: panic keys it off
        else:
            self.drone.pitch = pitch

    def panic(self):
        while self.sounding:
            _, voice = self.sounding.popitem()
            self.voices.key_off(voice)
        while self.sustained:
            self.voices.key_off(self.sustained.pop())
        if self.drone is not None:
            self.voices.key_off(self.drone)
            self.drone = None


class Chord:
    def __init__(self, voices, root):
        self.root = voices.key_on(root, 0.8)  # clean: end keys off root and third
        self.third = voices.key_on(root + 4, 0.6)  # clean: end keys off root and third
        self.fifth = voices.key_on(root + 7, 0.6)  # leak: end does nothing with the fifth
        self.voices = voices

    def end(self):
        levels = [v.gain for v in (self.root, self.third, self.fifth)]
        for voice in (self.root, self.third):
            self.voices.key_off(voice)
        self.root = self.third = self.fifth = None
        return levels
