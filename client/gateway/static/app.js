// The page: a form that asks for takes, and warnings while one types.

import { lostWords, TAGS, withWordsBelow } from "./lyrics.js";
import { audioContext } from "./player.js";
import { FRAMES_PER_S, minutes, Take } from "./take.js";

const MOST_SEED = 2n ** 63n - 1n;
const KEPT = ["caption", "lyrics"];
const EXAMPLE = {
  caption:
    "Warm acoustic folk at 92 BPM in G major: finger-picked steel-string guitar, brushed drums, upright bass, " +
    "a soft female voice close to the microphone. Sparse and organic, natural room sound.",
  lyrics:
    "[Verse]\nThe river learns the colour of the sky\nAnd carries every morning slowly by\n\n" +
    "[Chorus]\nStay a while, the light is on the water\nStay a while, the day is getting longer\n\n[Outro]\nStay a while",
};

const field = (id) => document.getElementById(id);

// ------------------------------------------------------------ words

function wireWords() {
  for (const id of KEPT) {
    field(id).value = localStorage.getItem(id) ?? "";
    field(id).addEventListener("input", () => localStorage.setItem(id, field(id).value));
  }
  for (const tag of TAGS) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: tag });
    button.addEventListener("click", () => insertTag(tag));
    field("tags").append(button);
  }
  field("example").addEventListener("click", () => {
    for (const id of KEPT) replaceText(field(id), 0, field(id).value.length, EXAMPLE[id]);
    field("lyrics").focus();
  });
  field("lyrics").addEventListener("input", showWarnings);
  showWarnings();
}

/** Put a tag on a line of its own where the cursor is. */
function insertTag(tag) {
  const { value, selectionStart: at, selectionEnd: end } = field("lyrics");
  const before = at === 0 || value[at - 1] === "\n" ? "" : "\n";
  const after = value[end] === "\n" ? "" : "\n";
  replaceText(field("lyrics"), at, end, `${before}[${tag}]${after}`);
  if (!after) field("lyrics").setSelectionRange(...Array(2).fill(field("lyrics").selectionEnd + 1));
}

function replaceText(area, start, end, text) {
  area.focus();
  area.setSelectionRange(start, end);
  // The one way that the browser's undo knows.
  if (!document.execCommand("insertText", false, text)) {
    area.setRangeText(text, start, end, "end");
    area.dispatchEvent(new Event("input"));
  }
}

function showWarnings() {
  const items = lostWords(field("lyrics").value).map((lost) => {
    const item = document.createElement("li");
    item.dataset.line = lost.line;
    item.dataset.kind = lost.kind;
    item.append(warningText(lost));
    if (lost.kind === "words") {
      const fix = Object.assign(document.createElement("button"), { type: "button", textContent: "Put below" });
      fix.setAttribute("aria-label", `Put the words of line ${lost.line} below the tag`);
      fix.addEventListener("click", () => {
        const { value } = field("lyrics");
        replaceText(field("lyrics"), 0, value.length, withWordsBelow(value, lost.line));
      });
      item.append(fix);
    }
    return item;
  });
  field("warnings").replaceChildren(...items);
}

function warningText({ line, kind, tags, words }) {
  const shown = (text) => `“${text.length > 60 ? `${text.slice(0, 60)}…` : text}”`;
  switch (kind) {
    case "words":
      return `Line ${line}: ${shown(words)} will not be sung, it shares the line with ${shown(tags)}.`;
    case "stamp":
      return `Line ${line}: ${shown(words)} will not be sung, because of the time stamp before it. Remove the stamp.`;
    case "tag":
      return `Line ${line}: ${shown(tags)} is not read as a tag. Its bracket must be closed, with nothing before it.`;
    default:
      return "There is nothing to sing but tags.";
  }
}

// ------------------------------------------------------------ knobs

function wireKnobs() {
  const showLength = () => { field("length-shown").textContent = minutes(Number(field("length").value)); };
  field("length").addEventListener("input", showLength);
  showLength();
  field("random").addEventListener("click", () => {
    // Short enough to read aloud; any number up to 2^63 - 1 may be typed.
    field("seed").value = String(crypto.getRandomValues(new Uint32Array(1))[0]);
  });
  field("key").value = sessionStorage.getItem("key") ?? "";
  field("key").addEventListener("input", () => sessionStorage.setItem("key", field("key").value));
}

// ------------------------------------------------------------ songs

function wireSongs() {
  field("song").addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  field("song").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) field("song").requestSubmit();
  });
}

function start() {
  const problem = wrongField();
  say(problem?.message ?? "");
  if (problem) {
    field(problem.id).focus();
    return;
  }
  audioContext(32000); // now: only a click or a key may start sound
  const first = BigInt(field("seed").value);
  const takes = Array.from({ length: Number(field("count").value) }, (_, index) => {
    const request = {
      caption: field("caption").value,
      lyrics: field("lyrics").value,
      seed: String(first + BigInt(index)),
      maxFrames: Number(field("length").value) * FRAMES_PER_S,
      key: field("key").value.trim(),
    };
    return new Take(request, { autoplay: index === 0, onEnd: ended });
  });
  field("empty").hidden = true;
  field("takes").prepend(...takes.map((take) => take.element));
  takes[0].element.scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function wrongField() {
  for (const [id, message] of [
    ["caption", "Say what it sounds like first."],
    ["lyrics", "There are no lyrics yet. For an instrumental, a tag and (instrumental) below it will do."],
  ]) {
    if (!field(id).value.trim()) return { id, message };
  }
  const seed = field("seed").value.trim();
  const most = MOST_SEED - BigInt(field("count").value) + 1n;
  if (!/^[0-9]{1,19}$/.test(seed) || BigInt(seed) > most) {
    return { id: "seed", message: `The seed is a whole number from 0 to ${most}.` };
  }
  return null;
}

function ended(error) {
  if (error?.status === 401) {
    field("key-field").hidden = false;
    field("key").focus();
  }
  if (error) look();
}

function say(text) {
  field("problem").textContent = text;
  field("problem").hidden = !text;
}

/** Ask whether the server is there; again in a while if it is not. */
async function look() {
  let ready = false;
  try {
    ready = (await fetch("health")).ok;
  } catch {
    // The gateway itself is away.
  }
  field("server").dataset.state = ready ? "ready" : "away";
  const text = ready ? "Ready" : "The music server does not answer";
  if (field("server").textContent !== text) field("server").textContent = text;
  if (!ready) setTimeout(look, 5000);
}

wireWords();
wireKnobs();
wireSongs();
look();
