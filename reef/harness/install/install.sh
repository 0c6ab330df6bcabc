#!/bin/sh
# Installs @PACKAGE@ with a harness that Reef serves, for this user alone. Made by Reef; there is no token in it.
#
#   REEF_BIN     where the wrapper goes (default: ~/.local/bin)
#   REEF_CLIENT  a client that is installed already, to be used instead of installing one
#   REEF_NPM     another npm
#
# Everything is in functions and the last line starts them, so that half a download does nothing.
set -eu

say() { printf 'reef: %s\n' "$*" >&2; }

need_node() {
  command -v node >/dev/null 2>&1 || {
    say "Node is missing, and this client needs Node @NODE@ or newer. Get it from https://nodejs.org/en/download,"
    say "from your system's packages, or without root with nvm (https://github.com/nvm-sh/nvm); then run this again."
    return 1
  }
  node -e '
    const has = process.versions.node.split(".").map(Number), needs = process.argv[1].split(".").map(Number);
    const at = needs.findIndex((need, place) => has[place] !== need);
    process.exit(at < 0 || has[at] > needs[at] ? 0 : 1);
  ' "@NODE@" </dev/null || {
    say "this client needs Node @NODE@ or newer, and $(command -v node) is $(node --version </dev/null). Get a newer one"
    say "from https://nodejs.org/en/download or with nvm (https://github.com/nvm-sh/nvm); then run this again."
    return 1
  }
}

need_npm() {
  [ -z "${REEF_CLIENT:-}" ] || return 0
  command -v "${REEF_NPM:-npm}" >/dev/null 2>&1 || {
    [ -z "${REEF_NPM:-}" ] || {
      say "REEF_NPM is $REEF_NPM, which is no program that can be run: name another, or unset it for the usual npm."
      return 1
    }
    say "npm is missing; it comes with Node from https://nodejs.org/en/download, or as a package of your system. Then"
    say "run this again. A client that is installed already can be named instead: REEF_CLIENT=/path/to/it"
    return 1
  }
}

need_home() {
  [ -n "${HOME:-}" ] || {
    say "HOME is not set: say whose installation this is, such as HOME=/home/me, and run this again."
    return 1
  }
}

payload() {
  cat <<'REEF_PAYLOAD'
@PAYLOAD@
REEF_PAYLOAD
}

main() {
  need_home
  need_node
  need_npm
  payload | node -e '
    const { createHash } = require("node:crypto"), fs = require("node:fs"), path = require("node:path");
    const data = Buffer.from(fs.readFileSync(0, "latin1"), "base64");
    if (createHash("sha256").update(data).digest("hex") !== process.argv[1]) {
      console.error("reef: this script was damaged on its way here; get it again. Nothing was changed.");
      process.exit(1);
    }
    process.on("uncaughtException", (error) => {
      console.error("reef: " + error.message + "; nothing was changed");
      process.exit(1);
    });
    const folder = fs.mkdtempSync(path.join(require("node:os").tmpdir(), "reef-install-"));
    process.on("exit", () => fs.rmSync(folder, { recursive: true, force: true }));
    for (const [name, text] of Object.entries(JSON.parse(data).program)) fs.writeFileSync(path.join(folder, name), text);
    import(require("node:url").pathToFileURL(path.join(folder, "setup.mjs")))
      .then((setup) => setup.main(data, process.argv.slice(2)))
      .then((code) => { process.exitCode = code; });
  ' "@DIGEST@" "$@"
}

main "$@"
