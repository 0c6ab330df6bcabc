// One change of an installation at a time.
// Knows: a lock file with its holder's process id. Does not know: what is changed.

import fs from "node:fs";
import path from "node:path";
import { aside } from "./disk.mjs";
import { Wrong } from "./say.mjs";

const STALE = 60 * 60 * 1000; // an installation of a client takes minutes, never this long

export function alive(pid) {
  if (!(pid > 0)) return false;
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return error.code === "EPERM";
  }
}

/** Whether somebody who is alive holds it. */
export function held(base) {
  const file = path.join(base, "lock");
  const found = fs.statSync(file, { throwIfNoEntry: false });
  const pid = holder(file);
  return found !== undefined && pid !== process.pid && alive(pid) && Date.now() - found.mtimeMs < STALE;
}

/** The process id in a lock; 0: there is none any more. */
function holder(file) {
  try {
    return Number(fs.readFileSync(file, "utf8")) || 0;
  } catch (error) {
    if (error.code === "ENOENT") return 0;
    throw error;
  }
}

/** Do something while nobody else changes `base`. */
export async function alone(base, work) {
  const file = path.join(base, "lock");
  const own = path.join(base, `.lock.${process.pid}`);
  try {
    fs.writeFileSync(own, String(process.pid));
    take(base, file, own);
  } finally {
    fs.rmSync(own, { force: true });
  }
  try {
    sweep(base);
    return await work();
  } finally {
    fs.rmSync(file, { force: true });
  }
}

/** What killed processes left aside. A stage with a journal is not that: it is to be completed. */
function sweep(base) {
  for (const name of fs.readdirSync(base)) {
    const [, pid] = /^\.lock\.(\d+)/.exec(name) ?? [];
    if (pid && !alive(Number(pid))) fs.rmSync(path.join(base, name), { force: true });
  }
  if (!alive(holder(taking(base)))) fs.rmSync(taking(base), { force: true });
  if (!fs.existsSync(path.join(base, "journal.json"))) {
    fs.rmSync(aside(path.join(base, "journal.json")), { force: true });
    fs.rmSync(path.join(base, "stage"), { recursive: true, force: true });
  }
}

function take(base, file, own) {
  for (let left = 5; left; left--) {
    try {
      fs.linkSync(own, file); // fails when it is there: whoever links holds
      return;
    } catch (error) {
      if (error.code !== "EEXIST") throw error;
    }
    if (held(base)) throw new Wrong("another process is changing this installation; try again when it is done");
    free(base, file, own);
  }
  throw new Wrong("another process is changing this installation; try again when it is done");
}

/** A lock whose holder is gone, removed: by one process at a time, so that nobody removes a new holder's. */
function free(base, file, own) {
  try {
    fs.linkSync(own, taking(base));
  } catch (error) {
    if (error.code !== "EEXIST") throw error;
    if (!alive(holder(taking(base)))) fs.rmSync(taking(base), { force: true });
    return;
  }
  try {
    if (!held(base)) fs.rmSync(file, { force: true });
  } finally {
    fs.rmSync(taking(base), { force: true });
  }
}

function taking(base) {
  return path.join(base, ".lock.taking");
}
