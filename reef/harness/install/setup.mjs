// The installer's second half: what the shell script hands over is put where it belongs.
// Knows: options and what people are told. Does not know: how files are swapped (apply, swap).

import fs from "node:fs";
import path from "node:path";
import { apply } from "./apply.mjs";
import { named } from "./client.mjs";
import { sha } from "./disk.mjs";
import { alone } from "./lock.mjs";
import { Wrong, print, quote, say, shown, speak } from "./say.mjs";
import * as state from "./state.mjs";
import { recover } from "./swap.mjs";
import { listed } from "./words.mjs";

/** `data` is the bundle's JSON, `options` the script's arguments. Returns the exit status. */
export async function main(data, options) {
  const bundle = JSON.parse(data);
  const name = `reef-${bundle.adapter}`;
  speak("reef");
  try {
    if (!/^[a-z0-9][a-z0-9-]*$/.test(bundle.adapter)) throw new Wrong("this installer names no agent; get it again");
    if (bundle.format !== 1) throw new Wrong("this installer is of another version than its program; get it again");
    const mode = choice(options);
    const base = state.base(bundle.adapter);
    if (base.includes("\\")) {
      throw new Wrong(
        `Node loads nothing from a folder with a backslash in its name: set XDG_DATA_HOME to another than ${shown(base)}`,
      );
    }
    const own = named();
    const bin = state.bin();
    fs.mkdirSync(path.join(base, "program"), { recursive: true });
    await recover(base);
    const old = state.current(base);
    const done =
      old?.digest === sha(data) && quiet(base, old, bundle, own, bin, mode)
        ? []
        : await alone(base, () => apply(base, bundle, sha(data), { own, mode, whole: true, bin, again: "bash -s --" }));
    if (!done.length) print(`${name}: already current, ${state.label(bundle.release)}`);
    else print([`${name}: installed`, ...done.map((line) => `  ${line}`)].join("\n"));
    next(bundle, name, bin);
    return 0;
  } catch (error) {
    say(error.message);
    return error.code === 2 ? 2 : 1;
  }
}

export function choice(options) {
  const strange = options.filter((each) => !["--theirs", "--ours"].includes(each));
  if (strange.length || options.length > 1)
    throw new Wrong(`options are --theirs or --ours, not ${strange.join(" ") || "both"}`, 2);
  return options[0]?.slice(2);
}

/** Whether nothing is to be done, found out without writing anything. */
function quiet(base, old, bundle, own, bin, mode) {
  const there = state.changes(base, old).filter((each) => each.text === null || mode === "theirs");
  const wrapper = path.join(bin, `reef-${bundle.adapter}`);
  return (
    !there.length &&
    old.client === own &&
    old.bin === bin &&
    state.runnable(wrapper) &&
    state.runnable(state.client(base, old)) &&
    fs.existsSync(path.join(base, "program", old.program, "main.mjs"))
  );
}

function next(bundle, name, bin) {
  const folders = (process.env.PATH || "").split(path.delimiter);
  const lines = [];
  if (!folders.includes(bin))
    lines.push(`export PATH=${quote(bin)}:"$PATH"    # so that ${name} is found; put it into your shell's start file`);
  if (!bundle.keyless && !process.env.REEF_TOKEN)
    lines.push("export REEF_TOKEN=...    # the token you have just used; it is kept nowhere");
  lines.push(name);
  print(["next:", ...lines.map((line) => `  ${line}`), `Reef's own words: ${listed(name)}`].join("\n"));
}
