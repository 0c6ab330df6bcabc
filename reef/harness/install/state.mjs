// What is installed, and where.
// Knows: the folders of one installation, `current.json` and `previous.json`. Does not know: how they change.
//
// base = ${XDG_DATA_HOME:-~/.local/share}/reef/<adapter>, with
//   client/<version>/   the client, by npm           root/           the client's config root: our files and its own
//   program/<digest>/   this program                 runs/           the last runs' sessions, for reports
//   current.json        what is installed, whole     previous.json   what was before, for a rollback
//   replaced/           local changes that an update was told to overwrite

import fs from "node:fs";
import path from "node:path";
import { load, read } from "./disk.mjs";
import { Wrong } from "./say.mjs";

export const ROOT = "/@reef-root@"; // stands for the config root in a bundle

export function base(adapter) {
  const data = process.env.XDG_DATA_HOME;
  return path.join(data && path.isAbsolute(data) ? data : path.join(home(), ".local", "share"), "reef", adapter);
}

export function bin() {
  return path.resolve(process.env.REEF_BIN || path.join(home(), ".local", "bin"));
}

function home() {
  if (!process.env.HOME) throw new Wrong("HOME is not set: say whose installation this is, such as HOME=/home/me");
  return path.resolve(process.env.HOME);
}

/** `{digest, bundle, client, launcher, clients}`; null when nothing is installed. */
export function current(base) {
  return load(path.join(base, "current.json"));
}

export function installed(base) {
  const found = current(base);
  if (found === null) throw new Wrong("nothing is installed here; run the installer again");
  return found;
}

export function previous(base) {
  return load(path.join(base, "previous.json"));
}

/** The client's program: one that was there already, or the one that npm installed. */
export function client(base, now) {
  return now.client ?? npm(base, now.bundle.client);
}

export function npm(base, client) {
  return path.join(base, "client", client.version, "node_modules", ".bin", client.program);
}

export function runnable(file) {
  try {
    fs.accessSync(file, fs.constants.X_OK);
    return fs.statSync(file).isFile();
  } catch {
    return false;
  }
}

/** Installed files that are no longer as they were installed: [{path, text}], text null when one is gone. */
export function changes(base, now) {
  const found = [];
  for (const [file, text] of Object.entries(now.bundle.files)) {
    const data = read(path.join(base, "root", file));
    if (data === null || !data.equals(Buffer.from(text))) found.push({ path: file, text: data && data.toString() });
  }
  return found;
}

export function label(release) {
  return `release ${release.seq} (${release.id.slice(0, 12)})`;
}
