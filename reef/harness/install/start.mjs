// Before the client runs: an interrupted update is completed, and a newer release is told of.
// Knows: the client's environment, runs and their sessions. Does not know: the client.
//
// What is printed is for the wrapper's `eval`: assignments, every value quoted. Nothing here may keep the client from
// starting but a missing token or client. The token is never printed: values that hold it name the variable.

import { randomUUID } from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { clean, print, quote, say, Wrong, shown } from "./say.mjs";
import { fetched, untold } from "./server.mjs";
import * as state from "./state.mjs";
import { recover } from "./swap.mjs";
import { hint } from "./words.mjs";

const SECONDS = 0.3; // a start waits no longer for the server
const RUNS = 50;
const LINE = 4000; // characters of a notice
const ASIDE = ["--version", "-v", "-V", "--help", "-h"];

export async function start(here, args) {
  const missed = hint(`reef-${path.basename(here.base)}`, args);
  if (missed) say(missed);
  const ready = await prepare(here, args);
  print(
    Object.entries(ready.environment)
      .map(([name, value]) => `export ${name}=${value}`)
      .join("\n"),
  );
  if (!("REEF_NOTICE" in ready.environment)) print("unset REEF_NOTICE");
  print(`reef_client=${quote(ready.client)}`);
  return 0;
}

/** `{client, environment, session}`; the environment's values are words for a shell. */
export async function prepare(here, args) {
  const { base } = here;
  try {
    await recover(base);
  } catch (error) {
    say(`an update that was interrupted could not be completed: ${error.message}`);
  }
  const now = state.installed(base);
  const { bundle } = now;
  const client = state.client(base, now);
  if (!state.runnable(client)) {
    throw new Wrong(`${shown(client)} is not there any more; \`reef-${bundle.adapter} doctor\` says what to do`, 127);
  }
  const environment = {};
  if (!process.env.REEF_TOKEN) {
    if (bundle.keyless)
      environment.REEF_TOKEN = quote("keyless"); // some clients want a value
    else if (!(args.length === 1 && ASIDE.includes(args[0]))) throw new Wrong(untold(), 2);
  }
  const session = randomUUID();
  environment.REEF_SESSION = quote(session);
  environment.REEF_NODE = quote(process.execPath);
  environment.REEF_RUN = quote(path.join(base, "runs", `${session}.client`)); // where a client's hook tells its own session
  for (const [name, value] of Object.entries(bundle.environment)) {
    if (/^[A-Za-z_]\w*$/.test(name)) environment[name] = word(value, path.join(base, "root"));
  }
  const notice = await look(bundle);
  if (notice && inside(bundle, here, args)) environment.REEF_NOTICE = quote(notice);
  else if (notice) say(notice);
  note(here, now, session);
  return { client, environment, session };
}

/** A value for the shell, with the config root in its place and $REEF_TOKEN, $REEF_SESSION left as variables. */
function word(value, root) {
  return (
    value
      .split(/(\$\{?REEF_(?:TOKEN|SESSION)\}?)/)
      .map((part, place) =>
        place % 2 ? `"\${${part.replace(/[${}]/g, "")}-}"` : part && quote(part.replaceAll(state.ROOT, () => root)),
      )
      .join("") || "''"
  );
}

/** Whether the client itself shows what REEF_NOTICE says. */
function inside(bundle, here, args) {
  return here.terminal && bundle.oneshot !== null && !args.some((each) => bundle.oneshot.includes(each));
}

/** What is new on the server, in one line; null: nothing, or no answer in time. */
async function look(bundle) {
  try {
    const asked = `/reef/harness?brief=true&since=${bundle.release.id}`;
    const { json } = await fetched(bundle, "GET", asked, { seconds: SECONDS });
    return json.release_id === bundle.release.id || !differs(json) ? null : told(bundle, json);
  } catch {
    return null;
  }
}

/** Releases that leave the harness as it is (other weights) are no news here. */
export function differs(json) {
  const changed = json.changes;
  return !changed || changed.added.length + changed.changed.length + changed.removed.length > 0;
}

export function told(bundle, json) {
  const words = [];
  for (const [verb, found] of Object.entries(json.changes ?? {})) {
    if (!Array.isArray(found) || verb === "releases" || !found.length) continue;
    const names = found.slice(0, 3).map((entry) => `${entry.kind} ${entry.id}`);
    words.push(`${verb} ${names.join(", ")}${found.length > 3 ? ` and ${found.length - 3} more` : ""}`);
  }
  const why = (json.changes?.releases ?? [])
    .map((release) => release.why ?? release.reason) // without the gate's words, where the server tells it so
    .filter(Boolean)
    .slice(0, 2)
    .join("; ");
  const line = clean(
    `release ${json.seq} is out (you have ${bundle.release.seq})${words.length ? `: ${words.join("; ")}` : ""}` +
      `${why ? `. Why: ${why.slice(0, 300)}` : ""}`,
  );
  return `${line.slice(0, LINE)}. To take it: reef-${bundle.adapter} update`; // a variable that is too long starts nothing
}

/** Remember the run, so that a report finds it. */
function note(here, now, session) {
  try {
    const folder = path.join(here.base, "runs");
    fs.mkdirSync(folder, { recursive: true });
    const run = { session, cwd: process.cwd(), pid: here.pid, parent: here.parent, at: Date.now() };
    const text = JSON.stringify({ ...run, release: now.bundle.release.id });
    fs.writeFileSync(path.join(folder, `${session}.json`), text, { mode: 0o600, flag: "wx" });
    for (const old of runs(here.base).slice(RUNS)) {
      for (const kind of ["json", "client"]) fs.rmSync(path.join(folder, `${old.session}.${kind}`), { force: true });
    }
  } catch {
    // a full or read-only disk keeps nobody from working
  }
}

/** Runs, newest first; those that a clock that was ahead has dated into the future come last. */
export function runs(base) {
  const folder = path.join(base, "runs");
  const found = [];
  for (const name of fs.existsSync(folder) ? fs.readdirSync(folder) : []) {
    if (!/^[0-9a-f-]{36}\.json$/.test(name)) continue;
    try {
      const run = JSON.parse(fs.readFileSync(path.join(folder, name), "utf8"));
      if (typeof run.session === "string" && typeof run.at === "number") found.push(run);
    } catch {
      continue;
    }
  }
  const now = Date.now();
  const age = (run) => (run.at > now ? Number.MAX_SAFE_INTEGER - run.at : now - run.at);
  return found.sort((one, other) => age(one) - age(other));
}
