// Plays a take while it arrives: sound is scheduled a little ahead, and goes on after a gap when more has come.

const AHEAD_S = 6;
const START_S = 0.05;
const TICK_MS = 200;

let context = null;

/** The page's one audio context; made in a click or key press, as browsers ask for. */
export function audioContext(rate) {
  context ??= new AudioContext({ sampleRate: rate, latencyHint: "playback" });
  context.resume();
  return context;
}

export class Player {
  #rate;
  #onChange;
  #pieces = []; // {from, samples}: interleaved stereo, `from` counted in sample pairs
  #length = 0;
  #complete = false;
  #held = 0; // where it stands while it does not play
  #next = 0; // the next sample pair to schedule
  #when = 0; // and the context's time for it
  #scheduled = []; // {source, at, from, to}
  #timer = null;

  constructor(rate, onChange) {
    this.#rate = rate;
    this.#onChange = onChange;
  }

  get playing() { return this.#timer !== null; }
  get duration() { return this.#length / this.#rate; }
  get pieces() { return this.#pieces.map((piece) => piece.samples); }

  /** Seconds from the start that are heard now. */
  get position() {
    if (!this.playing) return this.#held / this.#rate;
    let heard = this.#held;
    for (const { at, from, to } of this.#scheduled) {
      if (at > context.currentTime) break;
      heard = Math.min(from + (context.currentTime - at) * this.#rate, to);
    }
    return heard / this.#rate;
  }

  push(samples) {
    this.#pieces.push({ from: this.#length, samples });
    this.#length += samples.length / 2;
    if (this.playing) this.#pump();
  }

  /** No more sound will come. */
  end() {
    this.#complete = true;
  }

  play() {
    if (this.playing) return;
    audioContext(this.#rate);
    if (this.#complete && this.#held >= this.#length) this.#held = 0;
    this.#next = Math.floor(this.#held);
    this.#when = 0;
    this.#timer = setInterval(() => this.#pump(), TICK_MS);
    this.#pump();
    this.#onChange();
  }

  pause() {
    if (!this.playing) return;
    this.#held = this.position * this.#rate;
    clearInterval(this.#timer);
    this.#timer = null;
    for (const { source } of this.#scheduled) source.stop();
    this.#scheduled = [];
    this.#onChange();
  }

  seek(seconds) {
    const wasPlaying = this.playing;
    this.pause();
    this.#held = Math.max(0, Math.min(seconds * this.#rate, this.#length));
    if (wasPlaying) this.play();
    this.#onChange();
  }

  #pump() {
    const now = context.currentTime;
    if (this.#complete && this.#next >= this.#length && now > this.#when) {
      this.pause();
      this.#held = this.#length;
      this.#onChange();
      return;
    }
    while (this.#next < this.#length && this.#when < now + AHEAD_S) this.#schedule(now);
    // What was heard stays known through a gap; older entries are of no use.
    while (this.#scheduled.length > 2 && this.#scheduled[1].at < now) this.#scheduled.shift();
  }

  #schedule(now) {
    const { from, samples } = this.#pieces.findLast((piece) => piece.from <= this.#next);
    const skipped = this.#next - from;
    const count = samples.length / 2 - skipped;
    const buffer = context.createBuffer(2, count, this.#rate);
    for (const channel of [0, 1]) {
      const sound = buffer.getChannelData(channel);
      for (let i = 0; i < count; i += 1) sound[i] = samples[2 * (skipped + i) + channel] / 32768;
    }
    const source = context.createBufferSource();
    source.buffer = buffer;
    source.connect(context.destination);
    const at = this.#when > now ? this.#when : now + START_S;
    source.start(at);
    this.#scheduled.push({ source, at, from: this.#next, to: this.#next + count });
    this.#next += count;
    this.#when = at + count / this.#rate;
  }
}
