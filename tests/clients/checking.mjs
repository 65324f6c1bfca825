// How a Node client's checks are run: as checking.py does it.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";

export const [, , URL, MODEL] = process.argv;
const checks = [];

export const check = (name, run) => checks.push({ name, run });

export function equal(found, expected) {
  const [a, b] = [JSON.stringify(found), JSON.stringify(expected)];
  if (a !== b) throw new Error(`${a} is not ${b}`);
}

export function holds(condition, what) {
  if (!condition) throw new Error(what);
}

export async function refused(promise, ...words) {
  try {
    await promise;
  } catch (error) {
    for (const word of words) holds(String(error.message).includes(word), `${word} is not in ${error.message}`);
    return error;
  }
  throw new Error("nothing was refused");
}

function versionOf(name) {
  let folder = dirname(createRequire(join(process.cwd(), "x.js")).resolve(name));
  for (; folder !== dirname(folder); folder = dirname(folder)) {
    try {
      const found = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      if (found.name === name) return found.version;
    } catch {}
  }
  return "?";
}

export async function run(name) {
  const results = [];
  for (const { name, run } of checks) {
    let error = null;
    try {
      await run();
    } catch (caught) {
      const place = /client_\w+\.mjs:(\d+)/.exec(caught.stack ?? "")?.[1];
      error = `${caught.name} at line ${place}: ${String(caught.message).slice(0, 300)}`;
    }
    results.push({ name, error });
  }
  console.log(JSON.stringify({ version: versionOf(name), checks: results }));
  process.exit(0);
}
