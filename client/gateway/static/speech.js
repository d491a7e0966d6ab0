// The gateway's API as the page uses it: a song as events, and the WAV file that the API would have sent.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Asks for a song; yields its events, the sound in them as `samples`, interleaved 16-bit stereo.
 *  `seed` is a string of digits: seeds have 63 bits, and numbers here only 53. */
export async function* sing({ caption, lyrics, seed, maxFrames, key, signal }) {
  const fields = {
    input: lyrics,
    instructions: caption,
    max_new_tokens: maxFrames,
    response_format: "pcm",
    stream_format: "sse",
  };
  const body = `${JSON.stringify(fields).slice(0, -1)},"seed":${seed}}`;
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch("v1/audio/speech", { method: "POST", headers, body, signal });
  if (!answer.ok) throw await errorOf(answer);
  for await (const event of eventsOf(answer.body)) {
    if (event.type === "speech.audio.error") throw new ApiError(0, event.error.message);
    if (event.type === "speech.audio.delta") event.samples = samplesOf(event.audio);
    yield event;
    if (event.type === "speech.audio.done") return;
  }
  throw new ApiError(0, "The connection broke before the song was whole. Asking again gives the same song.");
}

/** A WAV file: the same bytes as the API's for the same song. */
export function wavFile(pieces, rate) {
  const bytes = pieces.reduce((sum, piece) => sum + piece.byteLength, 0);
  const view = new DataView(new ArrayBuffer(44));
  const text = (at, characters) => [...characters].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, bytes + 36, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 2, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, rate * 4, true);
  view.setUint16(32, 4, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, bytes, true);
  return new Blob([view, ...pieces], { type: "audio/wav" });
}

async function errorOf(answer) {
  try {
    return new ApiError(answer.status, (await answer.json()).error.message);
  } catch {
    return new ApiError(answer.status, `The gateway answered ${answer.status}.`);
  }
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  // A piece of sound comes in many reads; joined once, not at every read.
  let parts = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      parts.push(value);
      if (!value.includes("\n")) continue;
      const events = parts.join("").split("\n\n");
      parts = [events.pop()];
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) yield JSON.parse(data.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function samplesOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Int16Array(bytes.buffer);
}
