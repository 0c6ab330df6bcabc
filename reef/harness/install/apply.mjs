// A bundle made what is installed: which files change, which were changed here, all of it in one swap.
// Knows: three texts of a file (as installed, as it is here, as the bundle has it). Does not know: whence bundles come.

import fs from "node:fs";
import path from "node:path";
import { install, sound, tidy } from "./client.mjs";
import { merge, unified } from "./diff.mjs";
import { aside, guard, put, read, sha, sync, write } from "./disk.mjs";
import { Wrong, clean, print, quote, shown } from "./say.mjs";
import { current, label, previous } from "./state.mjs";
import { swap } from "./swap.mjs";

/**
 * What a bundle would change: `steps` for the swap, `kept` local changes that stay, `joined` settings that were put
 * together, `lost` local files that `--theirs` replaces, `clashes` that nobody decided.
 * `mode`: "theirs", "ours", or undefined; `whole`: files that are gone come back.
 */
export function plan(base, old, bundle, mode, whole = false) {
  const made = { steps: [], kept: [], joined: [], lost: [], clashes: [] };
  const was = old?.bundle.files ?? {};
  const now = bundle.files;
  for (const file of [...new Set([...Object.keys(was), ...Object.keys(now)])].sort()) {
    const inside = `root/${file}`;
    const data = read(guard(base, inside));
    const local = data === null ? null : data.toString();
    const before = Object.hasOwn(was, file) ? was[file] : null;
    const after = Object.hasOwn(now, file) ? now[file] : null;
    const step = { path: inside, data: after === null ? null : Buffer.from(after) };
    if (local === after) continue;
    if (local === before || (local === null && whole)) made.steps.push(step);
    else if (mode === "theirs") {
      made.steps.push(step);
      if (local !== null) made.lost.push({ path: file, data });
    } else if (before === after || mode === "ours") made.kept.push(file);
    else {
      const joined = [before, local, after].includes(null) ? null : merge(file, before, local, after);
      if (joined === null) made.clashes.push({ path: file, before, local, after });
      else {
        made.joined.push(file);
        if (joined !== local) made.steps.push({ path: inside, data: Buffer.from(joined) });
      }
    }
  }
  return made;
}

/** Say what stands against it, with the differences. */
export function clash(made, release, again) {
  for (const { path: file, before, local, after } of made.clashes) {
    const yours = local === null ? "(you removed it)" : before === null ? "(not from Reef)" : "(yours)";
    print(clean(unified(local ?? "", after ?? "", `${file} ${yours}`, `${file} (release ${release.seq})`), true));
  }
  const names = made.clashes.map((each) => shown(each.path)).join(", ");
  return new Wrong(
    `${names} changed here, and ${label(release)} changes the same: nothing was changed. ` +
      `${again} --theirs takes the release's (yours is kept beside it), ${again} --ours keeps yours`,
  );
}

/**
 * Make a bundle what is installed. `own` is a client that was there already. Returns what was done, in words; an empty
 * list: all of it was so already, and nothing was written.
 */
export function apply(base, bundle, digest, { own, mode, whole, bin, again }) {
  const old = current(base);
  sound(bundle);
  const ready = () => {
    const made = plan(base, old, bundle, mode, whole);
    if (made.clashes.length) throw clash(made, bundle.release, again);
    return made;
  };
  let made = ready();
  const done = [];
  if (own === null && install(base, bundle.client)) {
    done.push(`installed ${bundle.client.package} ${bundle.client.version}`);
    made = ready(); // npm takes minutes, in which a client that runs may write to its settings
  }
  const { program, ...kept } = bundle;
  const folder = program ? place(base, program) : old.program;
  const now = { digest, bundle: kept, client: own, program: folder, bin };
  if (JSON.stringify(old) !== JSON.stringify(now) || made.steps.length) {
    for (const { path: file, data } of made.lost) keep(base, file, data);
    const steps = [...made.steps, { path: "current.json", data: Buffer.from(JSON.stringify(now)) }];
    if (old !== null && old.digest !== digest) {
      steps.splice(-1, 0, { path: "previous.json", data: Buffer.from(JSON.stringify(old)) });
    }
    swap(base, steps);
    done.push(...words(old, bundle, made));
  }
  const wrapper = path.join(bin, `reef-${bundle.adapter}`);
  if (launcher(base, now)) done.push(`wrote ${shown(wrapper)}`);
  if (old !== null && old.bin !== bin) {
    const former = path.join(old.bin, `reef-${bundle.adapter}`);
    if (ours(former)) fs.rmSync(former);
  }
  if (done.length) {
    const used = [now, previous(base)].filter((each) => each && each.client === null);
    tidy(
      base,
      used.map((each) => each.bundle.client.version),
    );
    for (const name of fs.readdirSync(path.join(base, "program"))) {
      if (name !== folder) fs.rmSync(path.join(base, "program", name), { recursive: true, force: true });
    }
  }
  return done;
}

function words(old, bundle, made) {
  const to = label(bundle.release);
  const named = (steps) => steps.map((step) => shown(step.path.slice("root/".length))).join(", ");
  const files = made.steps.filter((step) => step.data !== null);
  const removed = made.steps.filter((step) => step.data === null);
  const [where, was] = [bundle, old?.bundle].map((each) => each && `${clean(each.scenario)} at ${clean(each.url)}`);
  const found = [old && old.bundle.release.id !== bundle.release.id ? `${label(old.bundle.release)} → ${to}` : to];
  if (where !== was) found.push(`scenario ${where}${was ? `; was: ${was}` : ""}`);
  if (files.length) found.push(`files: ${named(files)}`);
  if (removed.length) found.push(`removed: ${named(removed)}`);
  if (made.joined.length) found.push(`your own settings stay in ${made.joined.map(shown).join(", ")}`);
  if (made.kept.length) found.push(`your changes stay: ${made.kept.map(shown).join(", ")}`);
  if (made.lost.length)
    found.push(`your versions are kept below replaced/: ${made.lost.map((each) => shown(each.path)).join(", ")}`);
  return found;
}

/** A local file that is about to be replaced, kept. */
function keep(base, file, data) {
  const stamp = new Date().toISOString().replace(/[:.]/g, "-");
  const target = guard(base, `replaced/${stamp}/${file}`);
  fs.mkdirSync(path.dirname(target), { recursive: true });
  write(target, data);
}

/** The program in a folder of its own, so that a broken off update never leaves parts of two. */
function place(base, program) {
  const digest = sha(JSON.stringify(program)).slice(0, 16);
  const folder = path.join(base, "program", digest);
  const files = Object.entries(program);
  const same = ([name, text]) => read(path.join(folder, name))?.equals(Buffer.from(text));
  if (files.every(same)) return digest;
  guard(base, `program/${digest}/main.mjs`);
  const growing = path.join(base, "program", `.${digest}`);
  for (const each of [growing, folder]) fs.rmSync(each, { recursive: true, force: true });
  try {
    fs.mkdirSync(growing, { recursive: true });
    for (const [name, text] of files) write(path.join(growing, name), text);
    sync(growing);
  } catch (error) {
    fs.rmSync(growing, { recursive: true, force: true }); // a disk that is full is not kept so
    throw error;
  }
  fs.renameSync(growing, folder);
  sync(path.dirname(folder));
  return digest;
}

const MARK = "Written by Reef's installer.";

/** The wrapper that people call. True when it was not so already. */
function launcher(base, now) {
  const { adapter } = now.bundle;
  const file = path.join(now.bin, `reef-${adapter}`);
  const text = wrapper(base, adapter, now.program);
  const there = read(file);
  fs.rmSync(aside(file), { force: true }); // a killed process may have left it
  if (there !== null && there.toString() === text && fs.statSync(file).mode & 0o100) return false;
  const found = fs.lstatSync(file, { throwIfNoEntry: false });
  if (found && (!found.isFile() || !there.toString().includes(MARK))) {
    throw new Wrong(`${shown(file)} is there and is not Reef's: move it away, or set REEF_BIN to another folder`);
  }
  fs.mkdirSync(now.bin, { recursive: true });
  put(file, text, 0o755);
  return true;
}

export function ours(file) {
  return read(file)?.toString().includes(MARK) ?? false;
}

function wrapper(base, adapter, program) {
  return `#!/bin/sh
# reef-${adapter}: ${adapter} with the harness that Reef serves. ${MARK} \`reef-${adapter} uninstall\` removes it.
set -u
main=${quote(path.join(base, "program", program, "main.mjs"))}
base=${quote(base)}
command -v node >/dev/null 2>&1 || {
  echo "reef-${adapter}: node is not on PATH; it is needed" >&2
  exit 127
}
terminal=no reef_client=""
[ -t 0 ] && [ -t 1 ] && terminal=yes
case "\${1-}" in
update | rollback | status | doctor | uninstall | report | hook | --check | --check=*)
  exec node "$main" "$base" "$$" "$PPID" "$terminal" "$@"
  ;;
--)
  shift
  ;;
esac
variables=$(node "$main" "$base" "$$" "$PPID" "$terminal" start "$@") || exit
eval "$variables"
exec "$reef_client" "$@"
`;
}
