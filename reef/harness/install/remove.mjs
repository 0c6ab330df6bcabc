// What the installer put on a machine, taken away again, and nothing else.
// Knows: the list of what was installed. Does not know: what else lies there, which it names and leaves.

import fs from "node:fs";
import path from "node:path";
import { ours } from "./apply.mjs";
import { guard, prune, read } from "./disk.mjs";
import { alone } from "./lock.mjs";
import { Wrong, print, shown } from "./say.mjs";
import * as state from "./state.mjs";
import { recover } from "./swap.mjs";

const OWN = ["current.json", "previous.json"];
const FOLDERS = ["program", "client", "runs", "stage"];

/** `uninstall [--all]`; with --all also transcripts, changed files, and whatever else the client left in its folder. */
export async function uninstall(here, args) {
  if (args.some((each) => each !== "--all")) throw new Wrong("uninstall takes --all or nothing", 2);
  const { base } = here;
  await recover(base);
  const now = state.installed(base);
  await alone(base, () => {
    for (const file of FOLDERS) plain(path.join(base, file));
    if (args.includes("--all")) {
      for (const name of ["root", "replaced"]) {
        plain(path.join(base, name));
        fs.rmSync(path.join(base, name), { recursive: true, force: true });
      }
    } else {
      for (const [file, text] of Object.entries(now.bundle.files)) take(base, file, text);
    }
    const wrapper = path.join(now.bin, `reef-${now.bundle.adapter}`);
    if (ours(wrapper)) fs.rmSync(wrapper);
    for (const name of FOLDERS) fs.rmSync(path.join(base, name), { recursive: true, force: true });
    for (const name of OWN) fs.rmSync(path.join(base, name), { force: true });
  });
  const left = list(base);
  prune(path.join(base, "root"), base);
  prune(base, path.dirname(path.dirname(base)));
  print(`reef-${now.bundle.adapter}: uninstalled`);
  if (left.length) {
    const shownLeft = left.slice(0, 20).map((file) => `  ${shown(path.join(base, file))}`);
    if (left.length > 20) shownLeft.push(`  and ${left.length - 20} more`);
    print(["left, since Reef did not put it there or it was changed:", ...shownLeft].join("\n"));
    print(`to remove that, too: rm -r ${shown(base)}`);
  }
  return 0;
}

/** One installed file, if it is as installed; a changed one, or a link, is somebody's work. */
function take(base, file, text) {
  let target;
  try {
    target = guard(base, `root/${file}`);
  } catch {
    return;
  }
  const data = read(target);
  if (data === null || !data.equals(Buffer.from(text))) return;
  fs.rmSync(target);
  prune(path.dirname(target), base);
}

/** Folders that are removed whole must be ours, not links to elsewhere. */
function plain(folder) {
  if (fs.lstatSync(folder, { throwIfNoEntry: false })?.isSymbolicLink()) {
    throw new Wrong(`${shown(folder)} is a symbolic link, which the installer did not make: remove it first`);
  }
}

function list(base) {
  const found = [];
  const walk = (inside) => {
    for (const entry of fs.readdirSync(path.join(base, inside), { withFileTypes: true })) {
      const at = path.join(inside, entry.name);
      if (entry.isDirectory()) walk(at);
      else found.push(at);
    }
  };
  if (fs.existsSync(base)) walk("");
  return found.sort();
}
