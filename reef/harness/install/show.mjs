// How an installation stands: `status` and `doctor`.
// Knows: what there is to look at, and what to do about each. Changes nothing.

import { spawnSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import { ours } from "./apply.mjs";
import { which } from "./client.mjs";
import { guard, read, sha } from "./disk.mjs";
import { clean, print, shown } from "./say.mjs";
import { ask, fetched, untold } from "./server.mjs";
import { differs, runs, told } from "./start.mjs";
import * as state from "./state.mjs";
import { broken } from "./swap.mjs";
import { listed } from "./words.mjs";

/** `status [--json]` */
export async function status(here, args) {
  const now = state.installed(here.base);
  const { bundle } = now;
  const client = state.client(here.base, now);
  const found = {
    adapter: bundle.adapter,
    scenario: bundle.scenario,
    url: bundle.url,
    installed: bundle.release,
    served: null,
    changed: state.changes(here.base, now).map((each) => each.path),
    client: { path: client, version: version(client) },
    root: path.join(here.base, "root"),
    previous: state.previous(here.base)?.bundle.release ?? null,
    session: runs(here.base)[0]?.session ?? null,
  };
  let news = null;
  let why = null;
  try {
    const { json } = await fetched(bundle, "GET", `/reef/harness?brief=true&since=${bundle.release.id}`, {
      seconds: 5,
    });
    found.served = { id: json.release_id, seq: json.seq, reason: json.reason };
    if (json.release_id !== bundle.release.id)
      news = differs(json) ? told(bundle, json) : `release ${clean(json.seq)}, with the same files`;
  } catch (error) {
    why = error.message;
  }
  if (args.includes("--json")) {
    print(JSON.stringify(found, null, 2));
    return 0;
  }
  print(`${bundle.adapter}, scenario ${bundle.scenario} at ${clean(bundle.url)}`);
  print(`installed: ${state.label(bundle.release)}${bundle.release.reason ? `: ${clean(bundle.release.reason)}` : ""}`);
  print(`served:    ${found.served ? (news ?? "the same") : `not known: ${why}`}`);
  print(`client:    ${found.client.version ?? "does not run"} (${shown(client)})`);
  print(`changed:   ${found.changed.map(shown).join(", ") || "nothing"}`);
  return 0;
}

function version(client) {
  if (!state.runnable(client)) return null;
  const env = { ...process.env };
  delete env.REEF_TOKEN;
  const done = spawnSync(client, ["--version"], { stdio: ["ignore", "pipe", "pipe"], timeout: 20000, env });
  const said = `${done.stdout ?? ""}\n${done.stderr ?? ""}`.trim().split("\n")[0];
  return done.status === 0 ? clean(said) || "unknown" : null;
}

/** `doctor`: one line each, and what to do; the exit status says whether all is well. */
export async function doctor(here) {
  const now = state.installed(here.base);
  const looks = [node, client, wrapper, token, server, files, whole, words];
  let well = true;
  for (const look of looks) {
    let found;
    try {
      found = await look(here, now);
    } catch (error) {
      found = { bad: error.message };
    }
    if (found.bad) well = false;
    print(
      `${found.bad ? "wrong" : found.note ? "note " : "ok   "}  ${look.name.padEnd(8)} ${found.bad ?? found.note ?? found.good}`,
    );
  }
  return well ? 0 : 1;
}

function node(here, now) {
  const has = process.versions.node.split(".").map(Number);
  const needs = now.bundle.client.node.split(".").map(Number);
  const at = needs.findIndex((need, place) => has[place] !== need);
  if (at >= 0 && has[at] < needs[at]) {
    return {
      bad: `${process.versions.node}, and the client needs ${now.bundle.client.node}: get a newer one (https://nodejs.org, or nvm)`,
    };
  }
  return { good: `${process.versions.node} at ${shown(process.execPath)}` };
}

function client(here, now) {
  const file = state.client(here.base, now);
  const advice = now.client
    ? "install it again, or run the installer with REEF_CLIENT=/path/to/it (or without, to have it installed)"
    : `run reef-${now.bundle.adapter} update, or the installer again`;
  if (!state.runnable(file)) return { bad: `${shown(file)} is not there: ${advice}` };
  const said = version(file);
  return said === null ? { bad: `${shown(file)} does not run: ${advice}` } : { good: `${said} at ${shown(file)}` };
}

function wrapper(here, now) {
  const name = `reef-${now.bundle.adapter}`;
  const file = path.join(now.bin, name);
  if (!ours(file) || !state.runnable(file))
    return { bad: `${shown(file)} is not Reef's wrapper: run the installer again` };
  const found = which(name);
  if (found === null)
    return { note: `${shown(file)}; its folder is not on PATH: export PATH=${shown(now.bin)}:"$PATH"` };
  if (fs.realpathSync(found) !== fs.realpathSync(file))
    return { note: `${shown(found)} comes first on PATH, not ${shown(file)}` };
  return { good: shown(file) };
}

function token(here, now) {
  if (now.bundle.keyless) return { good: "the server asks for none" };
  return process.env.REEF_TOKEN ? { good: "REEF_TOKEN is set" } : { bad: untold() };
}

async function server(here, now) {
  const alive = await ask(now.bundle, "GET", "/healthz", { seconds: 5 });
  if (alive.status !== 200) return { bad: `${clean(now.bundle.url)} answered ${alive.status}: is it a Reef server?` };
  const { json } = await fetched(now.bundle, "GET", "/reef/harness?brief=true", { seconds: 5 });
  return { good: `${clean(now.bundle.url)} serves release ${clean(json.seq)}` };
}

function files(here, now) {
  for (const file of Object.keys(now.bundle.files)) guard(here.base, `root/${file}`);
  const changed = state
    .changes(here.base, now)
    .map((each) => `${shown(each.path)}${each.text === null ? " (gone)" : ""}`);
  const name = `reef-${now.bundle.adapter}`;
  if (changed.length)
    return { note: `changed here: ${changed.join(", ")}; ${name} update --theirs takes the release's again` };
  return { good: `${Object.keys(now.bundle.files).length} as installed` };
}

function whole(here, now) {
  if (broken(here.base))
    return { bad: `an update was broken off: start reef-${now.bundle.adapter}, which completes it` };
  const folder = path.join(here.base, "program", now.program);
  const texts = fs
    .readdirSync(folder)
    .sort()
    .map((name) => [name, read(path.join(folder, name)).toString()]);
  const same = sha(JSON.stringify(Object.fromEntries(texts))).startsWith(now.program);
  return same
    ? { good: "the wrapper's program is as installed" }
    : { bad: "the wrapper's program was changed: run the installer again" };
}

function words(here, now) {
  return { good: listed(`reef-${now.bundle.adapter}`) };
}
