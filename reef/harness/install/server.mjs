// Asking the Reef server.
// Knows: HTTP with a time limit, the token from REEF_TOKEN. Does not know: what the answers are for.
//
// The token goes to the installed address only: redirects are not followed, and it is in no message.

import { execFile } from "node:child_process";
import { Wrong, clean } from "./say.mjs";

const MOST = 64 * 1024 * 1024;

/** `{status, data, headers}` of one request; Wrong when there is no answer in `seconds`. */
export async function ask(bundle, method, route, { body, seconds = 30 } = {}) {
  const url = new URL(bundle.url.replace(/\/$/, "") + route);
  const { request } = await import(url.protocol === "https:" ? "node:https" : "node:http");
  const data = body === undefined ? undefined : Buffer.from(JSON.stringify(body));
  const headers = { "x-reef-scenario": bundle.scenario, accept: "*/*", connection: "close" };
  if (process.env.REEF_TOKEN && !bundle.keyless) headers.authorization = `Bearer ${process.env.REEF_TOKEN}`;
  if (data) Object.assign(headers, { "content-type": "application/json", "content-length": data.length });
  return new Promise((resolve, reject) => {
    const fail = (why) => {
      clearTimeout(clock);
      reject(new Wrong(`the Reef server at ${clean(bundle.url)} cannot be reached (${why}); is it running?`));
    };
    const clock = setTimeout(() => {
      call?.destroy();
      fail(`no answer in ${seconds} s`);
    }, seconds * 1000);
    let call;
    const lookup = seconds < 1 && url.hostname !== "localhost" ? apart(seconds) : undefined;
    try {
      call = request(url, { method, headers, agent: false, lookup }, (answer) => {
        const parts = [];
        let size = 0;
        answer.on("data", (part) => {
          parts.push(part);
          if ((size += part.length) > MOST) call.destroy(new Error("its answer is too large"));
        });
        answer.on("end", () => {
          clearTimeout(clock);
          resolve({ status: answer.statusCode, data: Buffer.concat(parts), headers: answer.headers });
        });
        answer.on("error", (error) => fail(error.message));
      });
    } catch (error) {
      fail(error.code === "ERR_INVALID_CHAR" ? "REEF_TOKEN holds characters that no token has" : error.message);
      return;
    }
    call.on("error", (error) => fail(error.code ?? error.message));
    call.end(data);
  });
}

/** Finding a name's addresses in a process of its own: Node does not end before a resolver that hangs does. */
function apart(seconds) {
  const code =
    'require("node:dns").lookup(process.argv[1], { all: true }, (error, found) => ' +
    "process.stdout.write(JSON.stringify(error ? { code: error.code } : found)))";
  const env = { ...process.env };
  delete env.REEF_TOKEN;
  return (name, { all }, done) => {
    const ended = { env, timeout: seconds * 1000, killSignal: "SIGKILL" };
    execFile(process.execPath, ["-e", code, "--", name], ended, (error, said) => {
      const found = error ? error : (parse(said) ?? new Error("its name cannot be looked up"));
      if (!Array.isArray(found) || !found.length) done(Object.assign(new Error("no address"), found));
      else if (all) done(null, found);
      else done(null, found[0].address, found[0].family);
    });
  };
}

/** The same for an answer that must be good: its JSON, or Wrong in the server's words. */
export async function fetched(bundle, method, route, options) {
  const answer = await ask(bundle, method, route, options);
  if (answer.status === 200) {
    const json = parse(answer.data);
    if (json === null || typeof json !== "object")
      throw new Wrong(`what answers at ${clean(bundle.url)} is no Reef server, or its answer was damaged on its way here`);
    return { ...answer, json };
  }
  const said = parse(answer.data)?.error?.message;
  if (answer.status === 401 && !process.env.REEF_TOKEN) throw new Wrong(untold());
  throw new Wrong(`the Reef server answered ${answer.status}${said ? `: ${clean(said)}` : ""}`);
}

export function untold() {
  return (
    "REEF_TOKEN is not set: export REEF_TOKEN=... with the token that `reef serve` printed, or with one that " +
    "`reef token create` made"
  );
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    return null;
  }
}
