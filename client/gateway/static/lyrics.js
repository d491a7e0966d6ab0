// What the model will not sing, told while one types. The rules are the model's (python_backend_models/cleaning.py
// says them once more, in the server, where they count): where a line begins with tags, its rest is dropped; only
// a line feed ends a line; nothing invisible may stand before a tag.

export const TAGS = ["Intro", "Verse", "Pre-Chorus", "Chorus", "Bridge", "Instrumental", "Outro"];

const LEADING_TAGS = /^[ \t]*((?:\[[^\]]+\][ \t]*)+)/;
const TIME_STAMP = /^\[\d+:\d+(?:[.:]\d+)?\]/;
const INVISIBLE = /^[\s\p{Cf}\x1c-\x1f\x85]+/u;
// What the server does not call blank; to JavaScript, a byte order mark is.
const SOMETHING = /[^\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/;
const WORDS = /[\p{L}\p{N}]/u;

/** What is lost of the lyrics: `{line, kind, tags, words}`, `line` from 1 (0: all of it), at most one per line.
 *  Kinds: `words` share a line with a tag, `stamp` the same with a time stamp, `tag` is none, `nothing` to sing. */
export function lostWords(lyrics) {
  const lost = [];
  const kept = [];
  lyrics.split("\n").forEach((text, index) => {
    const tags = LEADING_TAGS.exec(text);
    kept.push(tags === null ? text : tags[1]);
    if (tags === null) {
      const stuck = lostTag(text);
      if (stuck !== null) lost.push({ line: index + 1, kind: "tag", tags: stuck, words: "" });
      return;
    }
    const words = text.slice(tags[0].length).trim();
    if (!WORDS.test(words)) return;
    const kind = TIME_STAMP.test(tags[1]) ? "stamp" : "words";
    lost.push({ line: index + 1, kind, tags: tags[1].trim(), words });
  });
  const sung = WORDS.test(kept.join("\n").replace(/\[[^\]]+\]/g, " "));
  if (!sung && SOMETHING.test(lyrics)) lost.push({ line: 0, kind: "nothing", tags: "", words: "" });
  return lost;
}

/** The lyrics with the words of a line put below its tags, which is where they are sung. */
export function withWordsBelow(lyrics, line) {
  const lines = lyrics.split("\n");
  const text = lines[line - 1] ?? "";
  const tags = LEADING_TAGS.exec(text);
  if (tags === null) return lyrics;
  lines.splice(line - 1, 1, tags[1].trim(), text.slice(tags[0].length).trim());
  return lines.join("\n");
}

function lostTag(text) {
  const hidden = INVISIBLE.exec(text)?.[0] ?? "";
  const visible = text.slice(hidden.length);
  return visible.startsWith("[") ? visible : null;
}
