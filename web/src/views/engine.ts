// Engine: what the scheduler plans, when it is computed, where it is kept, and how near the machine's limits that comes.

import * as api from "../api.js";
import { app } from "../app.js";
import { Chart, COLOURS, drawTimeline, drawUses, lanes, latency } from "../charts.js";
import { bytes, count, milliseconds, percent } from "../display.js";
import { html, nothing, type TemplateResult } from "../dom.js";
import { asPerfetto, download, isPrefill } from "../export.js";
import { followAnew, isElsewhere, onSteps, stepLog } from "../step-log.js";
import type { BlockUse, CacheMap, StateMap, StateUse, Step, Work } from "../types.js";

const PLAN_ROWS = 40;

let map: CacheMap | null = null;
let isPaused = false;
let paused: readonly Step[] = []; // what was there when it was paused
let zoom = 0; // seconds that are shown; 0: what belongs to the current answer
let selected: number | null = null; // the request that is looked at; null: the current answer's
let planEnd: number | null = null; // the newest step that the table shows; null: the latest there is
let isMineOnly = false; // the table shows steps of the current answer alone
const timeline = picture("Timeline of requests: prefill and decode. The table below has the same steps in words.");
const blocks = picture("Map of cache blocks. The counts beside it say the same.");
const states = picture("Map of the states of recurrent layers. The counts beside it say the same.");
const stepTimes = new Chart(" ms");
const shares = new Chart("%");

function picture(name: string): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  return canvas;
}

const known = (): readonly Step[] => (isPaused ? paused : stepLog());

app.onTokens((branch) => { if (branch.state === "running") selected = null; });
onSteps(() => { if (app.view === "engine" && !isPaused) app.changed(); });

/** Show the engine of another model, or of another replica. */
export function showAnew(): void {
  map = null;
  selected = null;
  planEnd = null;
  isPaused = false;
  followAnew();
  void refreshMachine();
}

let isLooking = false;
async function lookAtCache(): Promise<void> {
  if (isLooking) return;
  isLooking = true;
  while (app.view === "engine" && app.isUp) {
    try {
      if (!isPaused) {
        map = await api.cache();
        app.changed();
      }
    } catch {
      break;
    }
    await new Promise((resolve) => setTimeout(resolve, 700));
  }
  isLooking = false;
}

function mine(): Set<number> {
  return new Set(app.tree.list().flatMap((branch) => branch.number ?? []));
}

export function engineView(): TemplateResult {
  if (isElsewhere) return html`<section class="panel"><h2>Engine</h2><p>The engine runs in another process, which does not show its steps here.</p></section>`;
  void lookAtCache();
  queueMicrotask(drawCanvases);
  const log = known();
  const number = selected ?? app.current?.number ?? null;
  const told = number === null ? null : latency(log, number);
  const last = log.at(-1);
  const recent = log.slice(-64);
  const seconds = recent.reduce((sum, step) => sum + step.seconds, 0);
  const tokens = recent.reduce((sum, step) => sum + step.works.reduce((all, work) => all + work.tokens, 0), 0);
  const share = bandwidthShare(recent);
  return html`
    <div class="engine">
      <section class="panel kpis" aria-label="Now">
        ${kpi("Running", last ? String(last.works.length) : "–", "requests in the last step")}
        ${kpi("Waiting", last ? String(last.waiting) : "–", "requests in the queue")}
        ${kpi("Step", milliseconds(recent.length ? (seconds / recent.length) * 1000 : null), `mean of the last ${recent.length}`)}
        ${kpi("Tokens", seconds ? `${count(Math.round(tokens / seconds))}/s` : "–", "computed, prompts included")}
        ${kpi("Bandwidth", share === null ? "–" : percent(share), ceilingText())}
        ${kpi("Compute", computeShare(recent) === null ? "–" : percent(computeShare(recent) ?? 0), computeText())}
        ${kpi("Cache", map ? percent(1 - map.counts.free / map.num_blocks) : "–", map ? `${count(map.num_blocks)} blocks of ${map.block_size}` : "")}
      </section>
      <section class="panel" aria-label="Timeline">
        <header><h2>Timeline</h2>
          <div class="tools">
            ${replicaChoice()}
            <label>Show <select @change=${(event: Event) => { zoom = Number((event.target as HTMLSelectElement).value); app.changed(); }}>
              <option value="0">this answer</option><option value="1">last second</option><option value="5">last 5 s</option><option value="30">last 30 s</option><option value="1e9">all</option>
            </select></label>
            <button type="button" aria-pressed=${isPaused} @click=${() => { isPaused = !isPaused; paused = [...stepLog()]; app.changed(); }}>${isPaused ? "Go on" : "Pause"}</button>
            <button type="button" id="perfetto" ?disabled=${!log.length} @click=${() => download("unspool-trace.json", asPerfetto(log), "application/json")}>Download for Perfetto</button>
          </div></header>
        <div class="canvas">${timeline}</div>
        <p class="keys"><span class="key prefill">prefill</span><span class="key decode">decode, yours</span><span class="key other">decode, others'</span></p>
        ${told?.gaps.length || told?.first ? latencyFacts(number ?? 0, told) : html`<p class="dim">${noSteps(number)}</p>`}
      </section>
      <div class="pair">
        <section class="panel" aria-label="Step times"><h2>Step time</h2>${stepTimes.node}</section>
        <section class="panel" aria-label="Shares"><h2>Share of this machine's measured ceilings</h2>${shares.node}
          <p class="keys"><span class="key decode">bandwidth</span>${app.machine?.compute?.ceiling ? html`<span class="key prefill">compute</span>` : nothing}</p></section>
      </div>
      ${cachePanel()}
      ${planTable()}
    </div>
  `;
}

function kpi(name: string, value: string, about: string): TemplateResult {
  return html`<div class="kpi"><span class="kpi-name">${name}</span><span class="kpi-value">${value}</span><span class="kpi-about">${about}</span></div>`;
}

function ceiling(): number | null {
  const told = app.machine?.bandwidth;
  if (!told?.ceiling) return null;
  // What a step has reached can be reached: a ceiling that was measured among neighbours is too low.
  return Math.max(told.ceiling, told.fastest ?? 0, ...known().slice(-512).map((step) => step.num_bytes / step.seconds));
}

function ceilingText(): string {
  const most = ceiling();
  return most === null ? "the ceiling is not measured yet" : `of ${bytes(most)}/s`;
}

function bandwidthShare(steps: readonly Step[]): number | null {
  const most = ceiling();
  const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
  if (most === null || !seconds) return null;
  return steps.reduce((sum, step) => sum + step.num_bytes, 0) / seconds / most;
}

function computeShare(steps: readonly Step[]): number | null {
  const most = app.machine?.compute?.ceiling ?? null;
  const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
  if (most === null || !seconds) return null;
  return steps.reduce((sum, step) => sum + step.flops, 0) / seconds / most;
}

function computeText(): string {
  const most = app.machine?.compute?.ceiling;
  return most ? `of ${(most / 1e9).toFixed(0)} G operations/s` : "the ceiling is not measured yet";
}

function latencyFacts(number: number, told: ReturnType<typeof latency>): TemplateResult {
  const sorted = [...told.gaps].sort((a, b) => a - b);
  const at = (share: number): number | null => (sorted.length ? (sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0) * 1000 : null);
  return html`<dl class="facts row">
    <div><dt>Request</dt><dd>#${number}</dd></div>
    <div><dt>First token after</dt><dd>${milliseconds(told.first === null ? null : told.first * 1000)}</dd></div>
    <div><dt>Between tokens, median</dt><dd>${milliseconds(at(0.5))}</dd></div>
    <div><dt>99% within</dt><dd>${milliseconds(at(0.99))}</dd></div>
    <div><dt>Pauses by others' prompts</dt><dd>${told.pauses.length ? told.pauses.slice(-3).map((pause) => `${milliseconds(pause.seconds * 1000)} (#${pause.request})`).join(", ") : "none"}</dd></div>
  </dl>`;
}

/** Which of several replicas is shown. */
function replicaChoice(): TemplateResult | typeof nothing {
  const { names, shown } = api.replicas();
  if (names.length < 2) return nothing;
  return html`<label>Replica <select id="replica" @change=${(event: Event) => { api.showReplica((event.target as HTMLSelectElement).value); showAnew(); app.changed(); }}>
    ${names.map((name) => html`<option value=${name} ?selected=${name === shown}>${name}</option>`)}</select></label>`;
}

function noSteps(number: number | null): string {
  if (number === null && app.current) return "The engines are replicas, each with numbers of its own: which request is yours is not known here.";
  return number === null ? "Run something: its steps appear here." : `The steps of request #${number} are no longer remembered, or are still to come.`;
}

const ours = (all: CacheMap, what: "blocks" | "states"): Set<number> => new Set(all.requests.filter((one) => mine().has(one.number)).flatMap((one) => one[what]));

function uses<Use extends BlockUse | StateUse>(names: readonly Use[], counts: Record<Use, number>): TemplateResult[] {
  return names.map((use) => html`<span class="key ${COLOURS[use]}">${use} ${count(counts[use])}</span>`);
}

function cachePanel(): TemplateResult {
  return html`<section class="panel" aria-label="Cache">
    <h2>Cache</h2>
    ${map
      ? html`<p class="keys">${uses(["private", "shared", "cached", "free"], map.counts)}
          <span class="dim">outlined: yours · prefix hits ${count(map.prefix_hits)} of ${count(map.prefix_queries)} tokens · ${map.preemptions} preemptions · ${map.evictions} evictions</span></p>`
      : html`<p class="dim">Looking …</p>`}
    <div class="canvas">${blocks}</div>
    ${map?.states ? statesPart(map.states) : nothing}
    ${map?.requests.length ? requestTable(map) : nothing}
  </section>`;
}

function statesPart(told: StateMap): TemplateResult {
  return html`<h3>States of recurrent layers</h3>
    <p class="keys">${uses(["held", "snapshot", "free"], told.counts)}
      <span class="dim">${bytes(told.bytes)} each · held: of one request · snapshot: where any request that begins alike can start · ${told.evictions} evictions</span></p>
    <div class="canvas" id="states">${states}</div>`;
}

function requestTable(told: CacheMap): TemplateResult {
  const heads = ["request", "state", "prompt", "tokens", "computed", "from cache", "blocks", ...(told.states ? ["states"] : [])];
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Requests in the cache"><table class="plain"><thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead><tbody>
    ${told.requests.map((one) => html`<tr class=${mine().has(one.number) ? "mine" : ""}><td>#${one.number}</td><td>${one.state}</td><td>${one.prompt_tokens}</td><td>${one.tokens}</td><td>${one.computed}</td><td>${one.cached}</td><td>${one.blocks.length}</td>${told.states ? html`<td>${one.states.length}</td>` : nothing}</tr>`)}
  </tbody></table></div>`;
}

/** The steps that the table shows, the newest first, and whether there are others before and after. */
function planPage(): { shown: Step[]; hasOlder: boolean; hasNewer: boolean } {
  const number = selected ?? app.current?.number ?? null;
  const all = isMineOnly ? known().filter((step) => step.works.some((work) => work.request === number)) : known();
  const found = planEnd === null ? -1 : all.findIndex((step) => step.number > (planEnd ?? 0));
  const end = found < 0 ? all.length : found;
  const begin = Math.max(0, end - PLAN_ROWS);
  return { shown: all.slice(begin, end).reverse(), hasOlder: begin > 0, hasNewer: end < all.length };
}

function planTable(): TemplateResult {
  const own = mine();
  const { shown, hasOlder, hasNewer } = planPage();
  const turn = (to: number | null): void => { planEnd = to; app.changed(); };
  const newest = shown[0]?.number ?? 0;
  const oldest = shown.at(-1)?.number ?? 0;
  return html`<section class="panel" aria-label="Plan">
    <header><h2>Plan, step by step</h2>
      <div class="tools">
        <label class="check"><input type="checkbox" id="mine-only" .checked=${isMineOnly} @change=${(event: Event) => { isMineOnly = (event.target as HTMLInputElement).checked; turn(null); }} /> This answer alone</label>
        <button type="button" id="older" ?disabled=${!hasOlder} @click=${() => turn(oldest - 1)}>Older</button>
        <button type="button" ?disabled=${!hasNewer} @click=${() => turn(newest + PLAN_ROWS)}>Newer</button>
        <button type="button" ?disabled=${planEnd === null} @click=${() => turn(null)}>Latest</button>
      </div></header>
    <div class="scroll tall" tabindex="0" role="region" aria-label="The scheduler's steps"><table class="plain plan">
      <thead><tr><th scope="col">step</th><th scope="col">time</th><th scope="col">what was computed</th><th scope="col">waiting</th><th scope="col">free blocks</th></tr></thead>
      <tbody>${shown.map((step) => html`<tr>
        <td>${step.number}</td><td>${milliseconds(step.seconds * 1000)}</td>
        <td>${step.works.slice(0, 12).map((work) => workButton(work, own))}${step.works.length > 12 ? html`<span class="dim"> and ${step.works.length - 12} more</span>` : nothing}</td>
        <td>${step.waiting}</td><td>${step.blocks_free}</td></tr>`)}</tbody>
    </table></div>
    <p class="dim small">#7 64 @ 0: request 7 computes 64 tokens from position 0 on. 1+3: one token and three drafted ones.</p>
  </section>`;
}

function workButton(work: Work, own: ReadonlySet<number>): TemplateResult {
  const what = isPrefill(work) ? `${work.tokens} @ ${work.start}` : work.samples > 1 ? `1+${work.samples - 1} @ ${work.start}` : `@ ${work.start}`;
  return html`<button type="button" class="work ${isPrefill(work) ? "prefill" : "decode"} ${own.has(work.request) ? "mine" : ""}"
    title="request ${work.request}: ${work.tokens} tokens from position ${work.start}${work.samples > 1 ? `, ${work.samples - 1} of them drafted` : ""}"
    @click=${() => { selected = work.request; app.changed(); }}>#${work.request} ${what}</button>`;
}

function range(): [number, number] {
  const log = known();
  const end = log.at(-1);
  const to = end ? end.start + end.seconds : 1;
  if (zoom > 0) return [Math.max(log[0]?.start ?? 0, to - zoom), to];
  const number = selected ?? app.current?.number ?? null;
  const own = log.filter((step) => step.works.some((work) => work.request === number));
  const first = own[0];
  const last = own.at(-1);
  if (!first || !last) return [Math.max(log[0]?.start ?? 0, to - 5), to];
  return [first.start, last.start + last.seconds];
}

function drawCanvases(): void {
  if (app.view !== "engine" || !timeline.isConnected) return;
  const [from, to] = range();
  const log = known();
  drawTimeline(timeline, lanes(log, mine()), from, to);
  if (map) drawUses(blocks, map.map, ours(map, "blocks"));
  if (map?.states) drawUses(states, map.states.map, ours(map, "states"));
  const shown = log.slice(-400);
  const zero = shown[0]?.start ?? 0;
  const times = shown.map((step) => step.start - zero);
  stepTimes.draw(times, [{ name: "step", colour: "decode", values: shown.map((step) => step.seconds * 1000) }]);
  const most = ceiling();
  const lines = [];
  if (most) lines.push({ name: "bandwidth", colour: "decode", values: shown.map((step) => (100 * step.num_bytes) / step.seconds / most) });
  if (app.machine?.compute?.ceiling) lines.push({ name: "compute", colour: "prefill", values: shown.map((step) => 100 * (computeShare([step]) ?? 0)) });
  if (lines.length) shares.draw(times, lines);
}

/** The ceilings are measured shortly after a server starts. */
export async function refreshMachine(): Promise<void> {
  for (let tries = 0; tries < 8 && !app.machine?.bandwidth.ceiling; tries++) {
    await new Promise((resolve) => setTimeout(resolve, 1500));
    try {
      app.machine = await api.machine();
      app.changed();
    } catch {
      return;
    }
  }
}
