// One take: its card on the page, from the request to the download.

import { Player } from "./player.js";
import { ApiError, sing, wavFile } from "./speech.js";

export const FRAMES_PER_S = 25;
const RATE = 32000;
const PEAK_SAMPLES = 800;
const BAR_PX = 3;
const SEEK_S = 5;

let current = null; // the take that plays; another one's play pauses it

export class Take {
  #request;
  #card;
  #player = new Player(RATE, () => this.#show());
  #abort = new AbortController();
  #peaks = [];
  #state = "waiting";
  #error = "";
  #frames = 0;
  #cap;
  #finish = "";
  #startedMs = performance.now();
  #touched = false; // played or paused by hand: it does not start by itself any more
  #url = null;
  #removed = false;
  #onEnd;

  /** `autoplay`: play as soon as there is sound. `onEnd` is told the error, or null. */
  constructor(request, { autoplay, onEnd }) {
    this.#request = request;
    this.#cap = request.maxFrames;
    this.#onEnd = onEnd;
    this.#touched = !autoplay;
    this.#card = document.getElementById("take").content.firstElementChild.cloneNode(true);
    this.#card.querySelector("h2").textContent = `Seed ${request.seed}`;
    Object.assign(this.#part("about"), { textContent: request.caption, title: request.caption });
    this.#part("play").addEventListener("click", () => this.#toggle());
    this.#part("cancel").addEventListener("click", () => this.cancel());
    this.#part("remove").addEventListener("click", () => this.#remove());
    this.#wireWave(this.#part("wave"));
    this.#show();
    this.#draw();
    this.#run();
  }

  get element() { return this.#card; }

  cancel() { this.#abort.abort(); }

  #part(name) { return this.#card.querySelector(`.${name}`); }

  async #run() {
    const clock = setInterval(() => this.#show(), 500);
    let error = null;
    try {
      for await (const event of sing({ ...this.#request, signal: this.#abort.signal })) this.#take(event);
      this.#state = "done";
    } catch (caught) {
      error = caught;
      this.#state = this.#abort.signal.aborted ? "cancelled" : "failed";
      this.#error = caught instanceof ApiError ? caught.message : "The gateway cannot be reached.";
    }
    clearInterval(clock);
    this.#player.end();
    this.#offer();
    this.#show();
    this.#onEnd(this.#state === "failed" ? error : null);
  }

  #take(event) {
    if (event.type === "speech.audio.done") {
      this.#finish = event.finish_reason;
      this.#frames = event.frames;
      return;
    }
    if (event.warnings) this.#note(event.warnings);
    this.#state = "writing";
    this.#frames = event.frames;
    this.#cap = event.frame_cap;
    this.#addPeaks(event.samples);
    this.#player.push(event.samples);
    if (!this.#touched) {
      this.#touched = true;
      this.#play();
    }
    this.#show();
  }

  #toggle() {
    this.#touched = true;
    if (this.#player.playing) this.#player.pause();
    else this.#play();
  }

  #play() {
    if (current !== this) current?.#player.pause();
    current = this;
    this.#player.play();
    this.#draw();
  }

  #remove() {
    this.#removed = true;
    this.cancel();
    this.#player.pause();
    if (current === this) current = null;
    if (this.#url) URL.revokeObjectURL(this.#url);
    const next = this.#card.nextElementSibling ?? this.#card.previousElementSibling;
    this.#card.remove();
    (next?.querySelector?.(".play") ?? document.getElementById("sing")).focus();
    document.getElementById("empty").hidden = document.querySelector(".take") !== null;
  }

  #offer() {
    // A take that is removed while it is written ends after that: nobody would give its file's memory back.
    if (this.#removed || !this.#player.duration) return;
    const link = this.#part("download");
    this.#url = URL.createObjectURL(wavFile(this.#player.pieces, RATE));
    link.href = this.#url;
    link.download = `song-seed${this.#request.seed}${this.#state === "done" ? "" : "-part"}.wav`;
    link.hidden = false;
  }

  #note(warnings) {
    const items = warnings.map((text) => Object.assign(document.createElement("li"), { textContent: text }));
    this.#part("notes").append(...items);
  }

  // ------------------------------------------------------------ what is seen

  #show() {
    const { playing, duration } = this.#player;
    const busy = this.#state === "waiting" || this.#state === "writing";
    this.#card.dataset.state = this.#state;
    setText(this.#part("state"), this.#words());
    const bar = this.#card.querySelector("progress");
    if (this.#state === "waiting") bar.removeAttribute("value");
    else bar.value = this.#frames / this.#cap;
    this.#part("play").disabled = !duration;
    setText(this.#part("play"), playing ? "Pause" : "Play");
    this.#part("cancel").hidden = !busy;
    this.#showTime();
    if (!playing) this.#draw();
  }

  #showTime() {
    const { position, duration } = this.#player;
    setText(this.#part("time"), duration ? `${minutes(position)} / ${minutes(duration)}` : "");
    const wave = this.#part("wave");
    setAttribute(wave, "aria-valuemax", Math.round(duration));
    setAttribute(wave, "aria-valuenow", Math.round(position));
    setAttribute(wave, "aria-valuetext", `${minutes(position)} of ${minutes(duration)}`);
  }

  #words() {
    const written = minutes(this.#frames / FRAMES_PER_S);
    const cap = minutes(this.#cap / FRAMES_PER_S);
    switch (this.#state) {
      case "waiting": {
        const waited = Math.round((performance.now() - this.#startedMs) / 1000);
        return `Waiting for the first sound … ${waited} s`;
      }
      case "writing":
        return `Being written: ${written} of at most ${cap}`;
      case "done":
        return this.#finish === "stop" ? `${written}. The song ended by itself.` : `${written}, the length that was set.`;
      case "cancelled":
        return this.#frames ? `Cancelled after ${written}.` : "Cancelled.";
      default:
        return this.#frames ? `${this.#error} (after ${written})` : this.#error;
    }
  }

  #addPeaks(samples) {
    for (let start = 0; start < samples.length; start += 2 * PEAK_SAMPLES) {
      let peak = 0;
      const end = Math.min(start + 2 * PEAK_SAMPLES, samples.length);
      for (let i = start; i < end; i += 1) peak = Math.max(peak, Math.abs(samples[i]));
      this.#peaks.push(peak / 32768);
    }
  }

  /** Seconds that the wave's width stands for: what is to come is left blank while it is written. */
  #span() {
    const busy = this.#state === "waiting" || this.#state === "writing";
    return busy ? Math.max(this.#cap / FRAMES_PER_S, this.#player.duration) : this.#player.duration || 1;
  }

  #draw() {
    const canvas = this.#part("wave");
    const scale = window.devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const brush = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    brush.clearRect(0, 0, width, height);
    const bars = Math.floor(width / (BAR_PX * scale));
    const peaksPerBar = (this.#span() * RATE) / PEAK_SAMPLES / bars;
    const heardBars = (this.#player.position / this.#span()) * bars;
    for (let bar = 0; bar < bars; bar += 1) {
      const first = Math.floor(bar * peaksPerBar);
      const peaks = this.#peaks.slice(first, Math.max(first + 1, Math.floor((bar + 1) * peaksPerBar)));
      if (!peaks.length) break;
      const tall = Math.max(2 * scale, Math.max(...peaks) * height * 0.92);
      brush.fillStyle = style.getPropertyValue(bar < heardBars ? "--accent" : "--wave");
      brush.fillRect(bar * BAR_PX * scale, (height - tall) / 2, (BAR_PX - 1) * scale, tall);
    }
    if (this.#player.playing && this.#card.isConnected) {
      requestAnimationFrame(() => this.#draw());
      this.#showTime();
    }
  }

  #wireWave(wave) {
    const seekTo = (event) => {
      const box = wave.getBoundingClientRect();
      this.#player.seek(((event.clientX - box.left) / box.width) * this.#span());
    };
    wave.addEventListener("pointerdown", (event) => {
      wave.setPointerCapture(event.pointerId);
      seekTo(event);
    });
    wave.addEventListener("pointermove", (event) => {
      if (wave.hasPointerCapture(event.pointerId)) seekTo(event);
    });
    wave.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -SEEK_S, ArrowRight: SEEK_S, Home: -Infinity, End: Infinity };
      if (event.key === " ") this.#toggle();
      else if (event.key in steps) this.#player.seek(this.#player.position + steps[event.key]);
      else return;
      event.preventDefault();
    });
    new ResizeObserver(() => this.#draw()).observe(wave);
  }
}

export function minutes(seconds) {
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

// What is unchanged is left alone, or screen readers would say it again.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
