// The client's package, installed with npm under the user's own folder, or a program that was there already.
// Knows: npm, PATH. Does not know: trees, releases.

import { spawnSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import { guard } from "./disk.mjs";
import { Wrong, say, shown } from "./say.mjs";
import { npm, runnable } from "./state.mjs";

/** The program that REEF_CLIENT names, as an absolute path; null when it names none. */
export function named() {
  const wanted = process.env.REEF_CLIENT;
  if (!wanted) return null;
  const found = wanted.includes("/") ? path.resolve(wanted) : which(wanted);
  if (!found || !runnable(found)) {
    throw new Wrong(`REEF_CLIENT is ${shown(wanted)}, which is no program that can be run; nothing was changed`);
  }
  return found;
}

export function which(name) {
  const folders = (process.env.PATH || "").split(path.delimiter).filter(Boolean);
  return folders.map((folder) => path.join(folder, name)).find(runnable) ?? null;
}

/** A bundle's names end in paths and commands: refused when they are more than names. */
export function sound({ client, program }) {
  const names = [client.version, client.program, client.package.replace(/^@[\w.-]+\//, ""), ...Object.keys(program ?? {})];
  const wrong = names.find((name) => !/^\w[\w.+-]*$/.test(name));
  if (wrong !== undefined) throw new Wrong(`${shown(wrong)} is no plain name; nothing was changed`);
}

/** Install the exact version; nothing is left half done: it grows aside and is renamed. True when it was not there. */
export function install(base, client) {
  if (runnable(npm(base, client))) return false;
  const place = `client/${client.version}`;
  if (fs.lstatSync(path.join(base, "client"), { throwIfNoEntry: false })) guard(base, `${place}/package.json`);
  const aside = path.join(base, "client", `.${client.version}`);
  fs.rmSync(aside, { recursive: true, force: true });
  fs.mkdirSync(aside, { recursive: true });
  fs.writeFileSync(path.join(aside, "package.json"), '{ "private": true }\n');
  const wanted = `${client.package}@${client.version}`;
  say(`installing ${wanted} with npm; this takes a moment`);
  const environment = { ...process.env };
  delete environment.REEF_TOKEN; // a package's scripts have no business with it
  const words = ["install", "--prefix", aside, "--save-exact", "--no-audit", "--no-fund", "--loglevel=error", wanted];
  const done = spawnSync(process.env.REEF_NPM || "npm", words, {
    cwd: aside,
    env: environment,
    stdio: ["ignore", "pipe", "inherit"],
  });
  const works = !done.error && done.status === 0 && runnable(path.join(aside, "node_modules", ".bin", client.program));
  if (!works) {
    const own = process.env.REEF_NPM ? `REEF_NPM is ${shown(process.env.REEF_NPM)}, which` : "npm";
    const why = done.error
      ? `${own} does not start: ${done.error.code ?? done.error.message}`
      : done.status === 0
        ? `it has no ${client.program}`
        : `exit ${done.status}`;
    fs.rmSync(aside, { recursive: true, force: true });
    throw new Wrong(`npm could not install ${wanted} (${why}); see what it says above. Nothing was changed`);
  }
  const target = path.join(base, "client", client.version);
  fs.rmSync(target, { recursive: true, force: true });
  fs.renameSync(aside, target);
  return true;
}

/** Remove versions that neither this installation nor the one before uses. */
export function tidy(base, used) {
  const folder = path.join(base, "client");
  if (fs.lstatSync(folder, { throwIfNoEntry: false })?.isSymbolicLink()) return;
  for (const name of fs.existsSync(folder) ? fs.readdirSync(folder) : []) {
    if (!used.includes(name)) fs.rmSync(path.join(folder, name), { recursive: true, force: true });
  }
}
