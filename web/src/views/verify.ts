// Verify: the same request again among random ones, bit for bit; and what a permalink promises.

import * as api from "../api.js";
import { app } from "../app.js";
import { bitsOf } from "../bits.js";
import type { Branch } from "../branches.js";
import { labelOf } from "../display.js";
import { html, nothing, type TemplateResult } from "../dom.js";
import { forkBody, numGiven, receiptDifferences, type Link } from "../export.js";
import type { Replay, Token } from "../types.js";
import { menu } from "./write.js";

interface Comparison { branch: Branch; replay: Replay; rows: Row[]; given: number; sameIds: number; sameBits: number }
interface Row { ours: Token | null; again: Token | null; isSameId: boolean; isSameBits: boolean }

let comparison: Comparison | null = null;
let isRunning = false;
let crowd = 16;
export let opened: Link | null = null;
let reproduced: Branch | null = null;

export function open(link: Link): void {
  opened = link;
  if (isLoaded(link.model)) void app.useModel(String(link.model));
  reproduced = null;
  app.asked = { mode: link.asked.mode, prompt: link.asked.prompt, messages: [], params: { ...link.asked.params } };
  if (link.asked.mode === "chat") {
    app.system = link.asked.messages.find((one) => one.role === "system")?.content ?? "";
    app.asked.prompt = link.asked.messages.filter((one) => one.role === "user").at(-1)?.content ?? "";
  }
}

const isLoaded = (name: string | null): boolean => app.models.some((one) => one.id === name && one.state === "loaded");

/** The model that a link names, where the page shows another one. It is loaded when it is asked for, not by opening a link. */
function otherModel(link: Link): string | null {
  return link.model !== null && link.model !== app.caps?.model && app.models.some((one) => one.id === link.model) ? link.model : null;
}

export function compare(branch: Branch, replay: Replay): Comparison {
  const again = replay.choices[0]?.tokens ?? [];
  const given = Math.min(numGiven(branch), branch.tokens.length);
  const rows = Array.from({ length: Math.max(branch.tokens.length, again.length) }, (_, index): Row => {
    const [a, b] = [branch.tokens[index] ?? null, again[index] ?? null];
    const isSameId = a !== null && b !== null && a.id === b.id;
    // What was given was not chosen, so a replay tells no logprob of it.
    const isSameBits = isSameId && (index < given || (a.logprob !== undefined && b.logprob !== undefined && bitsOf(a.logprob) === bitsOf(b.logprob)));
    return { ours: a, again: b, isSameId, isSameBits };
  });
  const chosen = rows.slice(given);
  return { branch, replay, rows, given, sameIds: rows.filter((row) => row.isSameId).length, sameBits: chosen.filter((row) => row.isSameBits).length };
}

async function verify(branch: Branch): Promise<void> {
  isRunning = true;
  comparison = null;
  app.changed();
  try {
    const replay = await api.replay({ ...forkBody(branch), logprobs: 0, crowd });
    comparison = compare(branch, replay);
  } catch (error) {
    app.fail(error);
  }
  isRunning = false;
  app.changed();
}

export function verifyView(): TemplateResult {
  const branch = app.current;
  return html`
    <div class="verify">
      ${opened ? linkPanel(opened) : nothing}
      <section class="panel" aria-label="Run again">
        <h2>Run it again, in a crowd</h2>
        <p>An answer is a function of weights, prompt, parameters and seed alone. So the same request gives the same tokens and the same logprobs, bit for bit, whatever runs beside it. This runs the current answer once more in one batch with random requests, and compares.</p>
        ${branch
          ? html`<form class="inline" @submit=${(event: Event) => { event.preventDefault(); void verify(branch); }}>
              <label>Random requests <input type="number" min="0" max="64" .value=${String(crowd)} @input=${(event: Event) => { crowd = Math.max(0, Math.min(64, Number((event.target as HTMLInputElement).value) || 0)); }} /></label>
              <button type="submit" class="primary" id="verify" ?disabled=${isRunning || app.isRunning(branch) || branch.tokens.length === 0}>${isRunning ? "Running …" : "Run again and compare"}</button>
              ${menu(branch)}
            </form>`
          : html`<p class="dim">There is no answer yet: run something in Write.</p>`}
        ${comparison ? result(comparison) : nothing}
      </section>
      ${branch?.receipt ? receipt(branch) : nothing}
    </div>
  `;
}

function result(told: Comparison): TemplateResult {
  const all = told.rows.length;
  const chosen = all - told.given;
  const isWhole = told.sameIds === all && told.sameBits === chosen;
  return html`
    <p class=${isWhole ? "verdict ok" : "verdict error"} role="status" id="verdict">
      ${isWhole ? "✓ Identical" : "✗ Different"}: ${told.sameIds} of ${all} token ids and ${told.sameBits} of ${chosen} logprobs are equal, bit for bit,
      ${told.given ? `(the first ${told.given} tokens were given to both)` : ""} beside ${told.replay.crowd} random requests (ours was number ${told.replay.place + 1} in the batch).
    </p>
    <div class="scroll tall" tabindex="0" role="region" aria-label="Comparison"><table class="plain bits">
      <thead><tr><th scope="col">#</th><th scope="col">token</th><th scope="col">id</th><th scope="col">bits of the logprob</th><th scope="col">again: id</th><th scope="col">bits</th><th scope="col"></th></tr></thead>
      <tbody>${told.rows.slice(0, 400).map((row, index) => html`<tr class=${row.isSameBits ? "" : "differs"}>
        <td>${index + 1}</td><td><span class="token">${row.ours ? labelOf(row.ours, 16) : "–"}</span></td>
        <td>${row.ours?.id ?? "–"}</td><td><code>${bits(row.ours)}</code></td><td>${row.again?.id ?? "–"}</td><td><code>${bits(row.again)}</code></td>
        <td>${row.isSameBits ? "=" : "≠"}</td></tr>`)}</tbody>
    </table></div>
  `;
}

function bits(token: Token | null): string {
  if (!token) return "–";
  return token.logprob === undefined ? "given" : bitsOf(token.logprob);
}

function receipt(branch: Branch): TemplateResult {
  const told = branch.receipt;
  return html`<section class="panel" aria-label="Receipt"><h2>Receipt</h2>
    <p class="dim">What the answer is a function of, besides its prompt and its parameters.</p>
    <dl class="receipt"><dt>weights</dt><dd><code>${told?.model}</code></dd><dt>version</dt><dd><code>${told?.version}</code></dd>
      <dt>kernels</dt><dd><code>${told?.kernels}</code></dd>${told?.overrides?.length ? html`<dt>overrides</dt><dd><code>${told.overrides.join(" ")}</code></dd>` : nothing}<dt>seed</dt><dd><code>${branch.seed ?? "–"}</code></dd></dl>
  </section>`;
}

function linkPanel(link: Link): TemplateResult {
  const here = app.caps?.receipt ?? null;
  const other = otherModel(link);
  const differences = link.receipt && here ? receiptDifferences(here, link.receipt) : [];
  const ids = reproduced?.tokens.map((token) => token.id) ?? [];
  const isSame = link.ids.length > 0 && ids.length === link.ids.length && ids.every((id, index) => id === link.ids[index]);
  return html`<section class="panel" aria-label="Permalink">
    <h2>From a link</h2>
    <p>The link holds a request and its seed${link.ids.length ? `, and the ${link.ids.length} token ids that it gave` : ""}.</p>
    <p class=${differences.length || !link.receipt || other ? "warn" : "ok"} id="receipt-verdict">${!link.receipt
      ? "The link has no receipt."
      : other ? `The link is of the model ${other}, and this page shows ${app.caps?.model}. Reproduce loads ${other} and asks it.`
      : differences.length ? `The receipt differs (${differences.join("; ")}): another answer would be no surprise.` : "✓ The receipt matches: the same weights, version and kernels."}</p>
    <p><button type="button" class="primary" id="reproduce" ?disabled=${app.loading !== null || (reproduced !== null && app.isRunning(reproduced))} @click=${() => void reproduce(link)}>Reproduce</button></p>
    ${reproduced && reproduced.state !== "running"
      ? html`<p role="status" id="reproduced" class=${!link.ids.length ? "" : isSame ? "verdict ok" : "verdict error"}>${!link.ids.length
          ? "Reproduced; the link has no token ids to compare with."
          : isSame ? `✓ Reproduced: all ${ids.length} token ids are the same.` : reproduced.error ?? "✗ The answer is another one."}</p>`
      : nothing}
  </section>`;
}

async function reproduce(link: Link): Promise<void> {
  const other = otherModel(link);
  if (other && !(await app.useModel(other))) return;
  const branch = app.tree.add(link.asked);
  branch.seed = link.seed;
  const body = app.body(link.asked, link.seed);
  if (link.output.length) {
    body.output = link.output;
    if (link.ids.length) body["max_tokens"] = Math.max(Number(link.asked.params["max_tokens"] ?? 0), link.ids.length);
  }
  reproduced = branch;
  app.show(branch);
  void app.follow(branch, body).then(() => app.changed());
}
