// One change of an installation at a time.
// Knows: a lock file with its holder's process id. Does not know: what is changed.

import fs from "node:fs";
import path from "node:path";
import { aside } from "./disk.mjs";
import { Wrong } from "./say.mjs";

const STALE = 60 * 60 * 1000; // an installation of a client takes minutes, never this long

export function alive(pid) {
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
  if (found === undefined) return false;
  const pid = Number(fs.readFileSync(file, "utf8"));
  return pid !== process.pid && pid > 0 && alive(pid) && Date.now() - found.mtimeMs < STALE;
}

/** Do something while nobody else changes `base`. */
export async function alone(base, work) {
  const file = path.join(base, "lock");
  const own = path.join(base, `.lock.${process.pid}`);
  fs.writeFileSync(own, String(process.pid));
  try {
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
  if (!fs.existsSync(path.join(base, "journal.json"))) {
    fs.rmSync(aside(path.join(base, "journal.json")), { force: true });
    fs.rmSync(path.join(base, "stage"), { recursive: true, force: true });
  }
}

function take(base, file, own) {
  for (let left = 3; left; left--) {
    try {
      fs.linkSync(own, file); // fails when it is there: whoever links holds
      return;
    } catch (error) {
      if (error.code !== "EEXIST") throw error;
    }
    if (held(base)) throw new Wrong("another process is changing this installation; try again when it is done");
    const stale = `${own}.stale`; // renamed away by one process only
    try {
      fs.renameSync(file, stale);
      fs.rmSync(stale);
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
  }
  throw new Wrong("another process is changing this installation; try again when it is done");
}
