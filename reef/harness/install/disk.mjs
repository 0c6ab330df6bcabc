// Files that survive a power cut, and paths that stay inside their folder.
// Knows: bytes, digests, fsync, symbolic links. Does not know: what is installed.

import { createHash } from "node:crypto";
import fs from "node:fs";
import path from "node:path";
import { Wrong, shown } from "./say.mjs";

export function sha(data) {
  return createHash("sha256").update(data).digest("hex");
}

/** A file's bytes; null when there is none. A symbolic link is not followed: it counts as an empty file of its own. */
export function read(file) {
  try {
    if (fs.lstatSync(file).isSymbolicLink()) return Buffer.alloc(0);
    return fs.readFileSync(file);
  } catch (error) {
    if (error.code === "ENOENT" || error.code === "ENOTDIR") return null;
    throw error;
  }
}

export function load(file) {
  const data = read(file);
  if (data === null) return null;
  try {
    const made = JSON.parse(data.toString());
    if (made !== null && typeof made === "object") return made;
    throw new Error("no object");
  } catch {
    throw new Wrong(`${shown(file)} is damaged: move it away and run the installer again`);
  }
}

export function sync(folder) {
  const handle = fs.openSync(folder, "r");
  try {
    fs.fsyncSync(handle);
  } finally {
    fs.closeSync(handle);
  }
}

/** A new file with its bytes on disk; `wx`: an old one is never written through. */
export function write(file, data, mode = 0o644) {
  fs.rmSync(file, { force: true });
  const handle = fs.openSync(file, "wx", mode);
  try {
    fs.writeFileSync(handle, data);
    fs.fsyncSync(handle);
  } finally {
    fs.closeSync(handle);
  }
}

/** Where a file's new bytes are until they are whole. One name for each file, so that a killed process leaves one. */
export function aside(file) {
  return path.join(path.dirname(file), `.${path.basename(file)}.reef`);
}

/** A file whole or as it was, on disk when this returns. */
export function put(file, data, mode = 0o644) {
  try {
    write(aside(file), data, mode);
    fs.renameSync(aside(file), file);
  } catch (error) {
    fs.rmSync(aside(file), { force: true });
    throw error;
  }
  sync(path.dirname(file));
}

/** The path of `inside` below `base`. Refused when it would leave it, or when a link stands anywhere on the way. */
export function guard(base, inside) {
  const parts = inside.split("/");
  if (parts.some((part) => !part || part === "." || part === ".." || part.includes("\0"))) {
    throw new Wrong(`${shown(inside)} is no path inside ${shown(base)}; nothing was changed`);
  }
  let at = base;
  for (const [place, part] of parts.entries()) {
    at = path.join(at, part);
    const found = fs.lstatSync(at, { throwIfNoEntry: false });
    if (found === undefined) break;
    if (found.isSymbolicLink()) {
      throw new Wrong(`${shown(at)} is a symbolic link, which is never written through: move it away and try again`);
    }
    const last = place === parts.length - 1;
    if (last ? found.isDirectory() : !found.isDirectory()) {
      const what = last ? "is a folder where a file belongs" : "is a file where a folder belongs";
      throw new Wrong(`${shown(at)} ${what}: move it away and try again`);
    }
  }
  return path.join(base, ...parts);
}

/** Remove folders that are empty, from this one up to `base`, which stays. */
export function prune(folder, base) {
  for (let at = folder; at !== base && at.startsWith(base + path.sep); at = path.dirname(at)) {
    try {
      fs.rmdirSync(at);
    } catch {
      return;
    }
  }
}
