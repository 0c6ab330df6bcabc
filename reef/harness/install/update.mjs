// The served release taken, or the one before it again.
// Knows: where bundles come from. Does not know: how one is applied.

import { apply, clash, plan } from "./apply.mjs";
import { sha } from "./disk.mjs";
import { alone } from "./lock.mjs";
import { Wrong, clean, print, shown } from "./say.mjs";
import { choice } from "./setup.mjs";
import { fetched } from "./server.mjs";
import * as state from "./state.mjs";
import { recover } from "./swap.mjs";

/** `update [--theirs|--ours] [--dry-run]` */
export async function update(here, args) {
  const dry = args.includes("--dry-run");
  const mode = choice(args.filter((each) => each !== "--dry-run"));
  await recover(here.base);
  const now = state.installed(here.base);
  const { adapter } = now.bundle;
  const answer = await fetched(now.bundle, "GET", `/reef/harness/install?adapter=${adapter}&form=json`);
  const digest = sha(answer.data);
  if (digest !== answer.headers["x-reef-digest"])
    throw new Wrong("the update was damaged on its way here; nothing was changed");
  const bundle = answer.json;
  if (bundle?.format !== 1) throw new Wrong("this Reef server needs a newer wrapper: run its installer again");
  if (bundle.adapter !== adapter)
    throw new Wrong(`the server sent ${clean(bundle.adapter)} for ${adapter}; nothing was changed`);
  const again = `reef-${adapter} update`;
  if (dry) return preview(here, now, bundle, digest, mode, again);
  const done = await alone(here.base, () =>
    apply(here.base, bundle, digest, { own: now.client, mode, whole: false, bin: now.bin, again }),
  );
  print(
    [
      `reef-${adapter}: ${done.length ? "updated" : `already current, ${state.label(bundle.release)}`}`,
      ...indented(done),
    ].join("\n"),
  );
  if (done.length && bundle.release.reason) print(`  why: ${clean(bundle.release.reason)}`);
  return 0;
}

function preview(here, now, bundle, digest, mode, again) {
  const made = plan(here.base, now, bundle, mode);
  if (made.clashes.length) throw clash(made, bundle.release, again);
  if (digest === now.digest && !made.steps.length) {
    print(`reef-${bundle.adapter}: already current, ${state.label(bundle.release)}`);
    return 0;
  }
  const from = `reef-${bundle.adapter}: ${state.label(now.bundle.release)}`;
  print(`${from} → ${state.label(bundle.release)}; nothing was changed yet`);
  for (const step of made.steps)
    print(`  ${step.data === null ? "removes" : "writes"} ${shown(step.path.slice("root/".length))}`);
  for (const file of [...made.kept, ...made.joined]) print(`  keeps your changes in ${shown(file)}`);
  return 0;
}

/** `rollback [--theirs|--ours]`: without the network, and again: back to where one was. */
export async function rollback(here, args) {
  const mode = choice(args);
  await recover(here.base);
  const now = state.installed(here.base);
  const before = state.previous(here.base);
  if (before === null) throw new Wrong("there is no version before this one");
  const { adapter } = now.bundle;
  const again = `reef-${adapter} rollback`;
  const done = await alone(here.base, () =>
    apply(here.base, before.bundle, before.digest, { own: before.client, mode, whole: false, bin: now.bin, again }),
  );
  print([`reef-${adapter}: rolled back`, ...indented(done)].join("\n"));
  return 0;
}

function indented(lines) {
  return lines.map((line) => `  ${line}`);
}
