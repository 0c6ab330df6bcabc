// Several files changed at once, or not at all.
// Knows: a stage, a journal, renames, and how they are completed or undone. Does not know: what the files are.
//
// Everything new is on disk in `stage/` before the journal is; from the journal on, a killed swap is completed at the
// next start (`recover`), and one that cannot be (a disk that refuses) is undone from the copies in the stage.
// Every step looks first whether it is done already, so both may be broken off and begun again anywhere.

import fs from "node:fs";
import path from "node:path";
import { guard, load, prune, put, read, sha, sync, write } from "./disk.mjs";
import { alone, held } from "./lock.mjs";
import { Wrong, say, shown } from "./say.mjs";

const FORMAT = 1;

/** Whether a swap was broken off. */
export function broken(base) {
  return fs.existsSync(path.join(base, "journal.json"));
}

/** `steps` are [{path, data}], below `base` and in their order; data null removes. The caller holds the lock. */
export function swap(base, steps) {
  const stage = path.join(base, "stage");
  const clear = () => fs.rmSync(stage, { recursive: true, force: true });
  for (const step of steps) guard(base, step.path);
  clear();
  try {
    fs.mkdirSync(stage);
    const listed = steps.map((step, place) => {
      const old = read(path.join(base, step.path));
      if (old !== null) write(path.join(stage, `old-${place}`), old);
      if (step.data !== null) write(path.join(stage, `new-${place}`), step.data);
      return { path: step.path, now: step.data === null ? null : sha(step.data), was: old === null ? null : sha(old) };
    });
    sync(stage);
    put(path.join(base, "journal.json"), JSON.stringify({ format: FORMAT, steps: listed }));
  } catch (error) {
    if (!broken(base)) clear();
    throw error;
  }
  finish(base);
}

/** Complete a swap, or undo it when it cannot be completed, which raises why. */
function finish(base) {
  const journal = load(path.join(base, "journal.json"));
  if (journal.format !== FORMAT) throw new Wrong("a newer version began an update here: run the installer again");
  try {
    forward(base, journal.steps);
  } catch (error) {
    back(base, journal.steps);
    close(base);
    throw error;
  }
  close(base);
}

function forward(base, steps) {
  for (const [place, step] of steps.entries()) {
    const target = guard(base, step.path);
    spare(base, step, target);
    if (step.now === null) {
      fs.rmSync(target, { force: true });
      prune(path.dirname(target), base);
    } else if (!is(target, step.now)) {
      fs.mkdirSync(path.dirname(target), { recursive: true });
      fs.renameSync(path.join(base, "stage", `new-${place}`), target);
    }
  }
  settle(base, steps);
}

function back(base, steps) {
  const troubles = [];
  for (const [place, step] of steps.entries()) {
    try {
      undo(base, place, step);
    } catch (error) {
      troubles.push(error); // the others are undone all the same; the journal stays for the next start
    }
  }
  if (troubles.length) throw troubles[0];
  settle(base, steps);
}

function undo(base, place, step) {
  const target = guard(base, step.path);
  spare(base, step, target);
  if (step.was !== null && !is(target, step.was)) {
    const again = path.join(base, "stage", `again-${place}`); // the copy stays until all is done
    write(again, fs.readFileSync(path.join(base, "stage", `old-${place}`)));
    fs.mkdirSync(path.dirname(target), { recursive: true });
    fs.renameSync(again, target);
  } else if (step.was === null && step.now !== null && is(target, step.now)) {
    fs.rmSync(target, { force: true });
    prune(path.dirname(target), base);
  }
}

/** What was written into a file after its swap was begun is somebody's work, and kept. */
function spare(base, step, target) {
  const data = read(target);
  if (data === null || !step.path.startsWith("root/") || [step.was, step.now].includes(sha(data))) return;
  const kept = guard(base, `replaced/${sha(data).slice(0, 16)}/${step.path.slice("root/".length)}`);
  if (fs.existsSync(kept)) return;
  fs.mkdirSync(path.dirname(kept), { recursive: true });
  write(kept, data);
  say(`${shown(target)} was changed during an update; that version is kept as ${shown(kept)}`);
}

function is(file, digest) {
  const data = read(file);
  return data !== null && sha(data) === digest;
}

function settle(base, steps) {
  const folders = new Set(steps.map((step) => path.dirname(path.join(base, step.path))));
  for (const folder of folders) if (fs.existsSync(folder)) sync(folder);
}

function close(base) {
  fs.rmSync(path.join(base, "journal.json"), { force: true });
  sync(base);
  fs.rmSync(path.join(base, "stage"), { recursive: true, force: true });
}

/** Complete what was broken off. Someone who is at it now is waited for, but not for ever: a start comes first. */
export async function recover(base, patience = 5000) {
  for (const end = Date.now() + patience; broken(base) && held(base) && Date.now() < end; ) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  if (!broken(base) || held(base)) return;
  await alone(base, () => {
    if (!broken(base)) return;
    try {
      finish(base);
      say("completed an update that was interrupted");
    } catch (error) {
      if (broken(base)) throw error;
      say(`took back an update that was interrupted and could not be completed (${error.message})`);
    }
  });
}
