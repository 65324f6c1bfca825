// Write: a prompt, its parameters, and the answer token by token.

import { isSignedIn } from "../api.js";
import { app } from "../app.js";
import { keptTokens, leastLikely, textOf, totalLogprob, type Branch, type Drafted } from "../branches.js";
import { bytes, labelOf, milliseconds, percent, visible } from "../display.js";
import { html, live, nothing, type TemplateResult } from "../dom.js";
import { asCsv, asCurl, asJson, asPython, download, encodeLink, linkOf } from "../export.js";
import { copy } from "../dom.js";
import { paramForm } from "../params.js";
import { onSteps } from "../step-log.js";
import { TINTS, type TintMode } from "../tint.js";
import { TokenView } from "../token-view.js";
import type { Token } from "../types.js";
import { stepPanel } from "./step.js";

export const answerView = new TokenView(
  { tint: app.tint, marks: app.marks, onSelect: (index) => { app.select(index); keepInSight(index); } },
  "Answer, token by token",
);
let edited: string | null = null; // the text while it is edited
const NARROW = "(max-width: 820px)"; // as in the style: the answer is below the form
const MOST_UNLIKELY = 5;

export function writeView(): TemplateResult {
  const { caps, current } = app;
  if (!caps) return html`<p class="loading">Loading …</p>`;
  const isRunning = app.isRunning(current);
  return html`
    <div class="write three">
      <form class="ask panel" aria-label="Request" novalidate @submit=${(event: Event) => { event.preventDefault(); start(); }} @keydown=${onKey}>
        <div class="modes" role="radiogroup" aria-label="Mode">
          ${(["completion", "chat"] as const).map(
            (mode) => html`<label><input type="radio" name="mode" value=${mode} .checked=${live(app.asked.mode === mode)}
              ?disabled=${mode === "chat" && !caps.has_template} @change=${() => { app.asked = { ...app.asked, mode }; app.changed(); }} />
              <span>${mode === "chat" ? "Chat" : "Completion"}</span></label>`,
          )}
        </div>
        ${app.asked.mode === "chat"
          ? html`<label class="field"><span>System</span>
              <textarea rows="2" placeholder="optional" .value=${live(app.system)} @input=${(event: Event) => { app.system = value(event); }}></textarea></label>`
          : nothing}
        <label class="field"><span>${app.asked.mode === "chat" ? "Message" : "Prompt"}</span>
          <textarea id="prompt" rows="5" spellcheck="false" .value=${live(app.asked.prompt)} @input=${(event: Event) => { app.asked.prompt = value(event); }}></textarea></label>
        <div class="actions">
          ${isRunning
            ? html`<button type="button" class="primary stop" @click=${() => current && app.stop(current)}>Stop</button>`
            : html`<button type="submit" class="primary">Run</button>`}
          <label class="check" title="Every step tells what each stage did to it: needed for entropy, slower for small models."><input type="checkbox" .checked=${live(app.record)} @change=${(event: Event) => { app.record = (event.target as HTMLInputElement).checked; app.changed(); }} /> Record every step</label>
        </div>
        ${paramForm(caps, app.asked.params, current?.params ?? {}, setParam)}
      </form>
      <section class="answer panel" aria-label="Answer">
        ${toolbar(current)}
        ${current?.error ? html`<p class="error" role="alert">${current.error} ${lost(current)}</p>` : nothing}
        ${current?.warnings.length ? html`<ul class="warnings">${current.warnings.map((text) => html`<li>${text}</li>`)}</ul>` : nothing}
        ${edited === null
          ? html`<div class="text">${promptText(current)}${answerView.node}${current ? nothing : html`<p class="dim hint">The answer comes here, each token tinted by how likely it was.</p>`}</div>`
          : html`<textarea class="edit" aria-label="Edit the answer" dir="auto" spellcheck="false" .value=${edited} @input=${(event: Event) => { edited = value(event); }}></textarea>
              <div class="actions"><button type="button" class="primary" @click=${goOn}>Go on from here</button>
                <button type="button" @click=${() => { edited = null; app.changed(); }}>Cancel</button>
                <span class="dim">What you leave as it was keeps its tokens; what you write is taken as if the model had chosen it.</span></div>`}
        ${current && edited === null ? unlikely(current) : nothing}
        ${current ? summary(current) : nothing}
      </section>
      ${stepPanel()}
    </div>
  `;
}

/** Where the step covers the lower part of the screen, its token moves to the upper one. */
function keepInSight(index: number): void {
  if (matchMedia(NARROW).matches) requestAnimationFrame(() => answerView.bringUp(index));
}

/** What the answer goes on from. Nothing stands between the two that the model did not write. */
function promptText(branch: Branch | null): TemplateResult | typeof nothing {
  return branch?.asked.mode === "completion" ? html`<span class="prompt-text" dir="auto">${visible(branch.asked.prompt)}</span>` : nothing;
}

function value(event: Event): string {
  return (event.target as HTMLTextAreaElement).value;
}

function setParam(name: string, given: unknown): void {
  const params = { ...app.asked.params };
  if (given === undefined || (typeof given === "number" && Number.isNaN(given))) delete params[name];
  else params[name] = given;
  app.asked = { ...app.asked, params };
  app.changed();
}

export function start(): void {
  edited = null;
  app.run(app.currentAsked());
  if (matchMedia(NARROW).matches) document.querySelector("section.answer")?.scrollIntoView();
}

function onKey(event: KeyboardEvent): void {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    start();
  }
}

function lost(branch: Branch): TemplateResult {
  const goesOn = html`<button type="button" @click=${() => app.run(branch.asked, { parent: branch, at: branch.tokens.length })} ?disabled=${!app.isUp}>Go on from what came</button>`;
  return html`${branch.tokens.length && branch.prompt.length ? goesOn : nothing}
    <button type="button" @click=${() => app.run(branch.asked, { seed: branch.seed })} ?disabled=${!app.isUp}>Run again</button>`;
}

function toolbar(branch: Branch | null): TemplateResult {
  const isIdle = branch !== null && !app.isRunning(branch);
  return html`
    <div class="toolbar" role="toolbar" aria-label="Answer">
      <label>Tint <select id="tint" @change=${(event: Event) => setTint((event.target as HTMLSelectElement).value as TintMode)}>
        ${TINTS.map((one) => html`<option value=${one.mode} ?selected=${one.mode === app.tint}>${one.name}</option>`)}
      </select></label>
      ${legend()}
      <label class="check"><input type="checkbox" id="marks" .checked=${live(app.marks)} @change=${(event: Event) => {
        app.marks = (event.target as HTMLInputElement).checked;
        answerView.set({ marks: app.marks });
        app.changed();
      }} /> Blanks &amp; specials</label>
      <span class="end"><button type="button" ?disabled=${!isIdle || !branch.tokens.length} @click=${() => { edited = textOf(branch?.tokens ?? []); app.changed(); }}>Edit</button>
        ${branch ? menu(branch) : nothing}</span>
    </div>
  `;
}

function setTint(mode: TintMode): void {
  app.tint = mode;
  answerView.set({ tint: mode });
  app.changed();
}

function legend(): TemplateResult {
  const about = TINTS.find((one) => one.mode === app.tint)?.about ?? "";
  const lacks = app.tint === "entropy" && app.current !== null && app.current.tokens.length > 0 && !app.current.tokens.some((token) => token.trace);
  return html`<span class="legend" title=${about}>
    ${app.tint === "none" ? nothing : html`<span class="scale" aria-hidden="true"></span>`}
    ${lacks ? html`<span class="warn">run again with “Record every step”</span>` : html`<span class="offscreen">${about}</span>`}
  </span>`;
}

export function menu(branch: Branch): TemplateResult {
  const link = (): string => `${location.origin}${location.pathname}#r=${encodeLink(linkOf(branch))}`;
  const say = async (text: string, what: string): Promise<void> => {
    app.tell((await copy(text)) ? `${what} is on the clipboard.` : `${what} could not be copied.`);
  };
  const items: [string, () => void][] = [
    ["Copy as curl", () => void say(asCurl(branch, location.origin, isSignedIn()), "The command")],
    ["Copy as Python", () => void say(asPython(branch, location.origin, isSignedIn()), "The program")],
    ["Copy permalink", () => void say(link(), "The link")],
    ["Download JSON", () => download("unspool-answer.json", asJson(branch), "application/json")],
    ["Download CSV of the trace", () => download("unspool-trace.csv", asCsv(branch), "text/csv")],
  ];
  return html`<details class="menu">
    <summary role="button">Export</summary>
    <ul>${items.map(([name, act]) => html`<li><button type="button" @click=${(event: Event) => { act(); (event.target as HTMLElement).closest("details")?.removeAttribute("open"); }}>${name}</button></li>`)}</ul>
  </details>`;
}

/** Keep the tokens of the text that was not touched, and go on after what was written. */
function goOn(): void {
  const branch = app.current;
  if (!branch || edited === null) return;
  const { kept, rest } = keptTokens(branch.tokens, edited);
  edited = null;
  app.run(branch.asked, { parent: branch, at: kept, text: rest });
}

export function summary(branch: Branch): TemplateResult {
  const timings = branch.report?.choices.find((one) => one.seed === branch.seed)?.timings ?? branch.report?.timings ?? null;
  const used = branch.report?.utilization;
  const share = (value: number | null | undefined, of: string): string => (typeof value === "number" ? ` (${percent(value)} ${of})` : "");
  const { sum, known } = totalLogprob(branch.tokens);
  const endings: Record<string, string> = {
    eos: "the model ended it", length: "cut at its length", stop: "stopped", constraint: "the constraint is fulfilled",
    abort: "stopped from outside", deadline: "out of time", repetition: "a repetition was found",
  };
  const state = branch.state === "running" ? "running" : branch.state === "failed" ? "failed" : branch.state === "stopped" && !branch.finish ? "stopped by you" : endings[branch.finish ?? ""] ?? branch.state;
  return html`<p class="summary" data-state=${branch.state} data-tokens=${branch.tokens.length}>
    <span class="state ${branch.state}">${state}${branch.stop !== null && branch.finish === "stop" ? html` at <code>${String(branch.stop)}</code>` : nothing}</span>
    <span>${branch.tokens.length} tokens</span>
    ${timings ? html`<span>first after ${milliseconds((timings.first_token ?? NaN) * 1000)}${share(used?.prefill_compute, "of compute")}</span>` : nothing}
    ${timings?.tokens_per_second ? html`<span>${timings.tokens_per_second.toFixed(1)} tokens/s${share(used?.mbu, "of memory bandwidth")}</span>` : nothing}
    ${used ? html`<span title="${bytes(used.weight_bytes)} of weights, ${bytes(used.cache_bytes)} of cache">${bytes(used.weight_bytes + used.cache_bytes)} read a token</span>` : nothing}
    ${known ? html`<span title="sum over ${known} tokens">logprob ${sum.toFixed(2)}</span>` : nothing}
    ${branch.report ? html`<span>${branch.report.cached_tokens} of ${branch.usage?.prompt_tokens ?? "?"} prompt tokens from the cache</span>` : nothing}
    ${branch.seed === null ? nothing : html`<span>seed ${branch.seed}</span>`}
    ${branch.drafted ? html`<span title="Tokens that speculation guessed: underlined where it was right, dotted where it was wrong.">${draftCount(branch.drafted)}</span>` : nothing}
    ${branch.held ? html`<span class="warn">held back for a possible stop string</span>` : nothing}
  </p>`;
}

function draftCount(drafted: Map<number, Drafted>): string {
  let accepted = 0;
  let rejected = 0;
  for (const one of drafted.values()) {
    accepted += Number(one.isAccepted);
    rejected += one.rejected;
  }
  return `drafts: ${accepted} accepted, ${rejected} rejected`;
}

const unlikelyTokens = new WeakMap<Branch, { numTokens: number; found: ReturnType<typeof leastLikely> }>();

function unlikelyOf(branch: Branch): ReturnType<typeof leastLikely> {
  let told = unlikelyTokens.get(branch);
  if (told?.numTokens !== branch.tokens.length) {
    told = { numTokens: branch.tokens.length, found: leastLikely(branch.tokens, MOST_UNLIKELY) };
    unlikelyTokens.set(branch, told);
  }
  return told.found;
}

/** Where a strange answer took its turn: its least likely tokens, one click away. */
function unlikely(branch: Branch): TemplateResult | typeof nothing {
  if (branch.state === "running") return nothing;
  const found = unlikelyOf(branch);
  if (!found.length) return nothing;
  return html`<p class="unlikely"><span class="dim">Least likely</span>${found.map(({ index, p }) => html`<button type="button" class="quiet" @click=${() => app.select(index)}
    title="Why token ${index + 1}"><span class="token">${labelOf(branch.tokens[index] as Token, 16)}</span> <span class="dim">${percent(p)}</span></button>`)}</p>`;
}

app.onTokens((branch) => {
  if (branch !== app.current) return;
  answerView.show(branch);
  answerView.markDrafts();
});
onSteps(() => { if (app.current?.drafted) { answerView.markDrafts(); app.changed(); } });
