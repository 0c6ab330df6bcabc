// Words for people and for the shell: messages on stderr, quoting, what must never reach a terminal.
// Knows: text. Does not know: files, servers, clients.

let speaker = "reef";
for (const stream of [process.stdout, process.stderr]) {
  stream.on("error", (error) => {
    if (error.code !== "EPIPE") throw error; // who read it, such as `head`, has gone: the work goes on all the same
  });
}

export function speak(name) {
  speaker = name;
}

/** Something a person can mend; `code` is the exit status. */
export class Wrong extends Error {
  constructor(message, code = 1) {
    super(message);
    this.code = code;
  }
}

export function say(text) {
  process.stderr.write(`${speaker}: ${text}\n`);
}

export function print(text) {
  process.stdout.write(`${text}\n`);
}

/** Text from elsewhere, without what a terminal would act on; one line, unless `lines`. */
export function clean(text, lines = false) {
  const shown = String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
  return lines ? shown : shown.replace(/[\t\n\u2028\u2029]+/g, " ");
}

/** One word for a POSIX shell, whatever is in the text. */
export function quote(text) {
  return `'${String(text).replaceAll("'", "'\\''")}'`;
}

/** How a path is written for a person who may paste it. */
export function shown(path) {
  return /^[\w@%+=:,./-]+$/.test(path) ? path : quote(clean(path));
}

/** The token, should it stand in a text that leaves this machine. */
export function redact(text) {
  const token = process.env.REEF_TOKEN;
  return token && token.length >= 6 ? text.replaceAll(token, "[token]") : text;
}

/** The last characters of a text, without the token, also where the cut would go through it. */
export function ending(text, length) {
  const token = process.env.REEF_TOKEN || "\0";
  const cut = Math.max(0, text.length - length);
  const at = text.lastIndexOf(token, cut);
  return redact(text.slice(cut && at >= 0 ? Math.max(cut, at + token.length) : cut));
}
