// pyright reads a user's code: tests/typed_sample.py, where each line with a mistake says so.
import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { check, holds, run } from "./checking.mjs";

const [, , , , root, python] = process.argv;

check("the typed sample", async () => {
  const settings = { include: [relative(process.cwd(), join(root, "tests/typed_sample.py"))],
    extraPaths: [relative(process.cwd(), join(root, "src"))], typeCheckingMode: "standard",
    enableTypeIgnoreComments: true, reportUnnecessaryTypeIgnoreComment: true };
  writeFileSync("pyrightconfig.json", JSON.stringify(settings));
  const done = spawnSync(process.execPath, ["node_modules/pyright/index.js", "-p", ".", "--outputjson", "--pythonpath",
    python], { encoding: "utf8", env: { ...process.env, PATH: `${dirname(process.execPath)}:${process.env.PATH}` } });
  const told = JSON.parse(done.stdout);
  const lines = told.generalDiagnostics.map((each) => `${each.range.start.line + 1}: ${each.message}`);
  holds(told.summary.filesAnalyzed === 1, `${told.summary.filesAnalyzed} files were read`);
  holds(lines.length === 0, lines.join("\n"));
});

await run("pyright");
