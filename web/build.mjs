// Bundles src/ into src/unspool/web/assets, which the server serves and the wheel packs.
import { build } from "esbuild";
import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";

const out = new URL("../src/unspool/web/assets/", import.meta.url);
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
await build({
  entryPoints: [new URL("src/main.ts", import.meta.url).pathname],
  outfile: new URL("inspector.js", out).pathname,
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none",
  loader: { ".css": "css" },
});
await cp(new URL("src/index.html", import.meta.url), new URL("index.html", out));
await cp(new URL("src/icon.svg", import.meta.url), new URL("icon.svg", out));

// The licences of what is bundled go along with it.
const licences = [];
for (const name of ["lit-html", "uplot", "d3-hierarchy"]) {
  const folder = new URL(`node_modules/${name}/`, import.meta.url);
  const { version, license } = JSON.parse(await readFile(new URL("package.json", folder), "utf8"));
  licences.push(`${name} ${version} (${license})\n\n${await readFile(new URL("LICENSE", folder), "utf8")}`);
}
await writeFile(new URL("licences.txt", out), licences.join("\n----\n\n"));
