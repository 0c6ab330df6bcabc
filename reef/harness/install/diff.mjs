// Two texts as a unified diff, and two changes of one settings file as one.
// Knows: lines and JSON. Does not know: files.

const MOST = 2000; // lines of either side that are compared one by one; longer ones are shown whole
const AROUND = 3;

/** A unified diff, or "" when the texts are equal. */
export function unified(before, after, nameBefore, nameAfter) {
  if (before === after) return "";
  const edits = script(lines(before), lines(after));
  const out = [`--- ${nameBefore}`, `+++ ${nameAfter}`];
  let a = 1;
  let b = 1;
  const numbered = edits.map(([sign, text]) => {
    const at = { sign, text, a, b };
    if (sign !== "+") a++;
    if (sign !== "-") b++;
    return at;
  });
  for (let from = 0; from < numbered.length; ) {
    if (numbered[from].sign === " ") {
      from++;
      continue;
    }
    let last = from;
    for (let at = from; at < numbered.length && at - last <= 2 * AROUND; at++) if (numbered[at].sign !== " ") last = at;
    const hunk = numbered.slice(Math.max(0, from - AROUND), last + AROUND + 1);
    const count = (sign) => hunk.filter((line) => line.sign !== sign).length;
    out.push(`@@ -${hunk[0].a},${count("+")} +${hunk[0].b},${count("-")} @@`);
    for (const line of hunk) out.push(line.sign + line.text);
    from = last + AROUND + 1;
  }
  return out.join("\n");
}

function lines(text) {
  const found = text.split("\n");
  if (found.at(-1) === "") found.pop();
  else found.push("\\ no newline at the end");
  return found;
}

/** [[" " | "-" | "+", line]]: the longest common subsequence, after what both begin and end with. */
function script(a, b) {
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a.at(-1 - tail) === b.at(-1 - tail)) tail++;
  const x = a.slice(head, a.length - tail);
  const y = b.slice(head, b.length - tail);
  const same = (line) => [" ", line];
  const middle =
    x.length > MOST || y.length > MOST
      ? [...x.map((line) => ["-", line]), ...y.map((line) => ["+", line])]
      : walk(x, y);
  return [...a.slice(0, head).map(same), ...middle, ...a.slice(a.length - tail).map(same)];
}

function walk(x, y) {
  const width = y.length + 1;
  const best = new Uint16Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--) {
    for (let j = y.length - 1; j >= 0; j--) {
      const next = (i + 1) * width + j;
      best[i * width + j] = x[i] === y[j] ? best[next + 1] + 1 : Math.max(best[next], best[i * width + j + 1]);
    }
  }
  const edits = [];
  let i = 0;
  let j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) {
      edits.push([" ", x[i++]]);
      j++;
    } else if (i < x.length && (j === y.length || best[(i + 1) * width + j] >= best[i * width + j + 1])) {
      edits.push(["-", x[i++]]);
    } else edits.push(["+", y[j++]]);
  }
  return edits;
}

/** A settings file that a client wrote to itself, with what a new release changes of it; null: they contradict. */
export function merge(file, base, local, theirs) {
  if (file.endsWith(".toml")) return appended(base, local, theirs);
  if (!file.endsWith(".json")) return null;
  try {
    const made = join(JSON.parse(base), JSON.parse(local), JSON.parse(theirs));
    return made === CONTRARY ? null : `${JSON.stringify(made, null, 2)}\n`;
  } catch {
    return null;
  }
}

/** Tables that were put at the end of TOML, at the end of another; null: they are no tables, or it changes the same. */
function appended(base, local, theirs) {
  const more = local.slice(base.length);
  const first = more.split("\n").find((line) => /^\s*[^\s#]/.test(line)) ?? "[";
  if (!local.startsWith(base) || ![base, theirs].every((text) => text.endsWith("\n")) || !/^\s*\[/.test(first)) return null;
  const [was, now] = [tables(base), tables(theirs)];
  return [...tables(more).keys()].every((name) => was.get(name) === now.get(name)) ? theirs + more : null;
}

/** The lines of TOML by the topmost name that they are about. */
function tables(text) {
  const found = new Map();
  let table = null;
  let name = "";
  for (const line of text.split("\n").filter((each) => each.trim())) {
    const [, header, key] = /^\s*(?:(\[\[?)\s*)?("[^"]*"|'[^']*'|[\w-]+)/.exec(line) ?? [];
    if (header) table = key;
    if (key) name = (table ?? key).replace(/^(["'])(.*)\1$/, "$2");
    found.set(name, `${found.get(name) ?? ""}${line}\n`);
  }
  return found;
}

const CONTRARY = Symbol("contrary");

function join(base, local, theirs) {
  if (equal(local, theirs) || equal(theirs, base)) return local;
  if (equal(local, base)) return theirs;
  if (![base ?? {}, local, theirs].every((value) => value && typeof value === "object" && !Array.isArray(value))) {
    return CONTRARY;
  }
  const made = {};
  for (const key of new Set([...Object.keys(local), ...Object.keys(theirs)])) {
    const value = join(own(base ?? {}, key), own(local, key), own(theirs, key));
    if (value === CONTRARY) return CONTRARY;
    if (value !== undefined)
      Object.defineProperty(made, key, { value, enumerable: true, writable: true, configurable: true });
  }
  return made;
}

function own(object, key) {
  return Object.hasOwn(object, key) ? object[key] : undefined;
}

function equal(one, other) {
  return JSON.stringify(sorted(one)) === JSON.stringify(sorted(other));
}

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (!value || typeof value !== "object") return value;
  return Object.entries(value)
    .map(([key, inner]) => [key, sorted(inner)])
    .sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
}
