// reef-<agent>: the client with the harness that Reef serves, and what is done with that harness.
// Called by the wrapper: main.mjs BASE PID PARENT TERMINAL COMMAND [arguments].
// Knows: the commands. Does not know: what they do. The token comes from REEF_TOKEN and goes to the Reef server only.

import path from "node:path";
import { say, speak } from "./say.mjs";

const COMMANDS = {
  start: ["./start.mjs", "start"],
  update: ["./update.mjs", "update"],
  rollback: ["./update.mjs", "rollback"],
  status: ["./show.mjs", "status"],
  doctor: ["./show.mjs", "doctor"],
  uninstall: ["./remove.mjs", "uninstall"],
  report: ["./report.mjs", "report"],
  hook: ["./report.mjs", "hook"],
};

const [base, pid, parent, terminal, command, ...args] = process.argv.slice(2);
speak(`reef-${path.basename(base)}`);
try {
  const [file, name] = COMMANDS[command] ?? ["./report.mjs", "check"];
  const done = (await import(file))[name];
  const here = { base, pid: Number(pid), parent: Number(parent), terminal: terminal === "yes" };
  process.exitCode = await done(here, COMMANDS[command] ? args : [command, ...args]);
} catch (error) {
  say(error.message);
  process.exitCode = error.code > 0 ? error.code : 1;
}
