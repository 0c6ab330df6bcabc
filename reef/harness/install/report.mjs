// What a run was worth, told to the server: by a person, by a check after the run, or by a client's hook.
// Knows: runs and their sessions, checks and their exit status. Does not know: what the server makes of it.

import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import fs from "node:fs";
import { constants } from "node:os";
import path from "node:path";
import { Wrong, clean, ending, print, redact, say } from "./say.mjs";
import { fetched } from "./server.mjs";
import { prepare, runs } from "./start.mjs";
import * as state from "./state.mjs";

const TAIL = 4000; // characters of a check's output that go along

/** `report [--score N] [--feedback TEXT] [--session ID]` */
export async function report(here, args) {
  const given = options(args, ["score", "feedback", "session"]);
  const { bundle } = state.installed(here.base);
  const body = {};
  if (given.score !== undefined) {
    body.score = Number(given.score);
    if (given.score.trim() === "" || !Number.isFinite(body.score))
      throw new Wrong("--score is a number, such as 1 or 0.5", 2);
  }
  if (given.feedback) body.feedback = given.feedback;
  if (!Object.keys(body).length)
    throw new Wrong("say what it was worth: report --score 1, or --feedback TEXT, or both", 2);
  const run = given.session ? { session: given.session } : find(here);
  const made = await send(bundle, { ...body, session: known(here.base, run.session) });
  const when = run.at ? ` of ${new Date(run.at).toLocaleTimeString()} in ${clean(run.cwd)}` : "";
  print(`reported on the run${when} (session ${clean(run.session)}): ${clean(made.agent_record_id)}`);
  return 0;
}

/** The run a person means: the one they are in, else the last one from this shell, else from this folder, else any. */
function find(here) {
  const known = runs(here.base);
  const run =
    known.find((each) => each.session === process.env.REEF_SESSION) ??
    // the run one is in, though it is not among the last ones any more, or its note could not be written
    (process.env.REEF_SESSION ? { session: process.env.REEF_SESSION } : undefined) ??
    known.find((each) => each.parent === here.parent) ??
    known.find((each) => each.cwd === process.cwd()) ??
    known[0];
  if (run === undefined) throw new Wrong("there was no run yet to report on");
  return run;
}

async function send(bundle, body) {
  return (await fetched(bundle, "POST", "/reef/report", { body })).json;
}

/** The session by which the server knows a run: the client's own, where its hook told it, else the one it was given. */
function known(base, session) {
  try {
    const told = JSON.parse(fs.readFileSync(path.join(base, "runs", `${session}.client`), "utf8"));
    return typeof told.session_id === "string" ? told.session_id : session;
  } catch {
    return session;
  }
}

/** `--check COMMAND [arguments of the client]`: its exit status, after the client's own run, is the run's score. */
export async function check(here, args) {
  const [first, ...rest] = args;
  const command = first.startsWith("--check=") ? first.slice("--check=".length) : rest.shift();
  if (!command) throw new Wrong('name a command: --check "pytest -q"', 2);
  if (rest[0] === "--") rest.shift();
  const { client, environment, session } = await prepare(here, rest);
  const { bundle } = state.installed(here.base);
  const ran = await attend(client, rest, environment);
  const done = await run(command);
  const metadata = { command: redact(command), exit: done.code, client_exit: ran, output: done.tail };
  const about = { session: known(here.base, session), agent_record_id: id(session, command) };
  await tell(bundle, command, done, { ...about, metadata });
  return ran || done.code;
}

/** `hook stop --check COMMAND`: the same for Claude Code's Stop hook, which gives a session on standard input. Nothing
 * here may stop the client: whatever goes wrong is said, and the status is 0. */
export async function hook(here, args) {
  const [event, ...rest] = args;
  try {
    const given = options(rest, ["check"]);
    if (event !== "stop" || !given.check) throw new Wrong('say what is to be run: hook stop --check "pytest -q"');
    const { bundle } = state.installed(here.base);
    const told = turn();
    const receipts = quoted(told.transcript_path);
    const done = await run(given.check, typeof told.cwd === "string" ? told.cwd : undefined);
    const metadata = { command: redact(given.check), exit: done.code, output: done.tail };
    const about = receipts.length ? { references: receipts } : { session: told.session_id };
    await tell(bundle, given.check, done, { ...about, metadata });
  } catch (error) {
    say(error.message);
  }
  return 0;
}

/** What Claude Code says of the turn that ended, on standard input. */
function turn() {
  try {
    const told = process.stdin.isTTY ? null : JSON.parse(fs.readFileSync(0, "utf8"));
    if (typeof told.session_id === "string" || typeof told.transcript_path === "string") return told;
  } catch {
    // nothing, or nothing of Claude Code's
  }
  throw new Wrong("`hook stop` works only as a hook of Claude Code, which says which turn it was; see docs/install.md");
}

/** The receipts of the last turn of a Claude Code transcript: its `requestId`s after the last words of a person. */
export function quoted(file) {
  if (typeof file !== "string" || !fs.existsSync(file)) return [];
  let found = [];
  for (const text of fs.readFileSync(file, "utf8").split("\n")) {
    try {
      const line = JSON.parse(text);
      const parts = line.message?.content;
      const said =
        typeof parts === "string" || (Array.isArray(parts) && parts.some((part) => part.type !== "tool_result"));
      if (line.type === "user" && !line.isMeta && said) found = [];
      if (line.type === "assistant" && /^[0-9a-f]{32}$/.test(line.requestId)) found.push(line.requestId);
    } catch {
      continue; // the line that is being written
    }
  }
  return [...new Set(found)].slice(-1000);
}

async function tell(bundle, command, done, body) {
  const why = unmeasured(command, done);
  if (why !== null) {
    say(`the check could not run (${why}); nothing was reported`);
    return;
  }
  const found = worth(done);
  try {
    const made = await send(bundle, { ...body, ...found });
    say(`the check ${found.score ? "passed" : "failed"}; reported as ${clean(made.agent_record_id)}`);
  } catch (error) {
    say(`the check ${found.score ? "passed" : "failed"}, but that could not be reported: ${error.message}`);
  }
}

/** Why a check says nothing of the run, which is no score of 0; null: it says something. */
function unmeasured(command, { code, signal, tail }) {
  const [name] = Object.entries(constants.signals).find(([, number]) => 128 + number === code) ?? [];
  if (signal || name) return `ended by ${signal ?? name}`;
  if (code === 126 || code === 127) return `exit status ${code}: a command that is not there, or not to be run`;
  const pytest = /\bpytest\b/.test(command) || /^no tests (ran|collected)/m.test(tail);
  return code === 5 && pytest ? "exit status 5: pytest found no tests" : null;
}

/** A pass is a score; of a failure what the check said goes along as feedback, which is what a harness learns from. */
function worth(done) {
  if (done.code === 0) return { score: 1 };
  return { score: 0, feedback: done.tail.trim() || `the check ended with exit status ${done.code}` };
}

function id(session, command) {
  return `rep_${createHash("sha256").update(`${session}\0${command}`).digest("hex").slice(0, 32)}`;
}

/** The client in this terminal, with its environment; its exit status, 128 and more for a signal. */
function attend(client, args, environment) {
  const env = { ...process.env };
  delete env.REEF_NOTICE;
  for (const [name, text] of Object.entries(environment)) env[name] = unquote(text, env);
  return new Promise((resolve, reject) => {
    const child = spawn(client, args, { stdio: "inherit", env });
    const pass = (signal) => child.kill(signal);
    const signals = ["SIGTERM", "SIGHUP"];
    for (const signal of signals) process.on(signal, pass);
    process.on("SIGINT", ignore); // the terminal tells the client itself
    child.on("error", (error) => reject(new Wrong(`the client could not be started: ${error.message}`, 127)));
    child.on("exit", (code, signal) => {
      for (const each of signals) process.off(each, pass);
      process.off("SIGINT", ignore);
      resolve(code ?? 128 + (constants.signals[signal] ?? 1));
    });
  });
}

function ignore() {}

/** A word that `start` made for a shell, as the shell would read it. */
export function unquote(text, env) {
  return text.replace(/'([^']*)'|\\(.)|"\$\{(\w+)-\}"/gs, (_, plain, escaped, name) =>
    name ? (env[name] ?? "") : (plain ?? escaped),
  );
}

/** A shell command, its output shown on standard error and its end kept. */
function run(command, cwd) {
  return new Promise((resolve, reject) => {
    const env = { ...process.env };
    delete env.REEF_SESSION; // else Reef's plugin for pytest would report the same run once more
    const child = spawn("sh", ["-c", command], { cwd, env, stdio: ["ignore", "pipe", "pipe"] });
    let tail = "";
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding("utf8").on("data", (part) => {
        process.stderr.write(part);
        tail = (tail + part).slice(-TAIL - (process.env.REEF_TOKEN ?? "").length);
      });
    }
    child.on("error", (error) => reject(new Wrong(`the check could not be started: ${error.message}`, 127)));
    child.on("close", (code, signal) =>
      resolve({ code: code ?? 128 + (constants.signals[signal] ?? 1), signal, tail: ending(tail, TAIL) }),
    );
  });
}

/** `--name value` and `--name=value`, of these names only. */
export function options(args, names) {
  const found = {};
  for (let at = 0; at < args.length; at++) {
    const [, name, joined] = /^--([a-z]+)(?:=(.*))?$/s.exec(args[at]) ?? [];
    if (!names.includes(name))
      throw new Wrong(
        `no option ${clean(args[at])} here; there are: ${names.map((each) => `--${each}`).join(", ")}`,
        2,
      );
    const value = joined ?? args[++at];
    if (value === undefined) throw new Wrong(`--${name} needs a value`, 2);
    found[name] = value;
  }
  return found;
}
