// The wrapper's own words, which the client never sees.
// Knows: how they are spelled. Does not know: what they do (main).

import { clean } from "./say.mjs";

export const WORDS = ["update", "rollback", "status", "doctor", "report", "hook", "uninstall"];

/** All of them, in a line for people. */
export function listed(name) {
  return `${name} ${WORDS.join("|")}, ${name} --check COMMAND; all else goes to the client`;
}

/** What to say of an only argument that is nearly one of them; null: nothing. */
export function hint(name, args) {
  const known = [...WORDS, "--check"];
  if (args.length !== 1 || known.includes(args[0])) return null; // the word itself comes here after `--`
  const meant = known.find((word) => near(args[0], word));
  return meant ? `${clean(args[0])} goes to the client; if you meant Reef's own word: ${name} ${meant}` : null;
}

/** Whether a letter is missing, too many, another, or two that stand side by side are swapped. */
function near(text, word) {
  let from = 0;
  while (from < text.length && text[from] === word[from]) from++;
  const [left, right] = [text.slice(from), word.slice(from)];
  const swapped = right[1] + right[0] + right.slice(2);
  const other = left.slice(1) === right.slice(1);
  return left.slice(1) === right || left === right.slice(1) || other || left === swapped;
}
