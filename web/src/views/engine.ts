// Engine: what the scheduler plans, when it is computed, where it is kept, and how near the machine's limits that comes.

import * as api from "../api.js";
import { app } from "../app.js";
import type { Branch } from "../branches.js";
import { Chart, drawCache, drawTimeline, lanes, latency } from "../charts.js";
import { bytes, count, milliseconds, percent } from "../display.js";
import { html, nothing, type TemplateResult } from "../dom.js";
import { asPerfetto, download, isPrefill } from "../export.js";
import type { CacheMap, Step } from "../types.js";

const MOST = 8192;
const PLAN_ROWS = 40;

let log: Step[] = [];
let map: CacheMap | null = null;
let following: AbortController | null = null;
let isPaused = false;
let isElsewhere = false; // the engine is in another process, which shows none of its steps
let zoom = 0; // seconds that are shown; 0: what belongs to the current answer
let selected: number | null = null;
const timeline = document.createElement("canvas");
const cacheCanvas = document.createElement("canvas");
const stepTimes = new Chart(" ms");
const shares = new Chart("%");
timeline.setAttribute("role", "img");
timeline.setAttribute("aria-label", "Timeline of requests: prefill and decode. The table below has the same steps in words.");
cacheCanvas.setAttribute("role", "img");
cacheCanvas.setAttribute("aria-label", "Map of cache blocks. The counts beside it say the same.");

export const stepLog = (): readonly Step[] => log;

/** Follow the engine while the page is open: steps as they come, the cache once a second while it is looked at. */
export function follow(): void {
  if (following) return;
  const abort = (following = new AbortController());
  void (async () => {
    try {
      for await (const news of api.steps(log.at(-1)?.number ?? -1, abort.signal)) {
        if (news.steps[0] && log.at(-1) && news.steps[0].number <= (log.at(-1)?.number ?? -1)) log = []; // a new server counts anew
        log.push(...news.steps);
        if (log.length > MOST) log.splice(0, log.length - MOST);
        if (app.view === "engine" && !isPaused) app.changed();
      }
    } catch (error) {
      if (error instanceof api.LostError) app.watch();
      else if (error instanceof api.ApiError && error.status === 501) {
        isElsewhere = true;
        return;
      }
    }
    if (following !== abort) return; // another model is followed now
    following = null;
    if (!abort.signal.aborted) setTimeout(() => { if (app.isUp) follow(); else setTimeout(follow, 3000); }, 1500);
  })();
}

export function restart(): void {
  log = [];
}

/** Follow the engine of the model that is shown now. */
export function followAnew(): void {
  following?.abort();
  following = null;
  log = [];
  map = null;
  void refreshMachine();
  follow();
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

/** Tokens of an answer that a draft guessed right, by the starts of its request's steps. */
export function draftedOf(branch: Branch): Map<number, "accepted"> | null {
  if (branch.number === null) return null;
  const found = new Map<number, "accepted">();
  const works = log.flatMap((step) => step.works.filter((work) => work.request === branch.number));
  works.forEach((work, place) => {
    const next = works[place + 1];
    if (work.samples < 2 || isPrefill(work)) return;
    const made = (next?.start ?? branch.prompt.length + branch.tokens.length - 1) - work.start;
    for (let offset = 0; offset < made - 1; offset++) found.set(work.start + offset + 1 - branch.prompt.length, "accepted");
  });
  return found.size ? found : null;
}

export function engineView(): TemplateResult {
  if (isElsewhere) return html`<section class="panel"><h2>Engine</h2><p>The engine runs in another process, which does not show its steps here.</p></section>`;
  void lookAtCache();
  queueMicrotask(drawCanvases);
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
            <label>Show <select @change=${(event: Event) => { zoom = Number((event.target as HTMLSelectElement).value); app.changed(); }}>
              <option value="0">this answer</option><option value="1">last second</option><option value="5">last 5 s</option><option value="30">last 30 s</option><option value="1e9">all</option>
            </select></label>
            <button type="button" aria-pressed=${isPaused} @click=${() => { isPaused = !isPaused; app.changed(); }}>${isPaused ? "Go on" : "Pause"}</button>
            <button type="button" id="perfetto" ?disabled=${!log.length} @click=${() => download("unspool-trace.json", asPerfetto(log), "application/json")}>Download for Perfetto</button>
          </div></header>
        <div class="canvas">${timeline}</div>
        <p class="keys"><span class="key prefill">prefill</span><span class="key decode">decode, yours</span><span class="key other">decode, others'</span></p>
        ${told ? latencyFacts(number ?? 0, told) : html`<p class="dim">Run something: its steps appear here.</p>`}
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
  return Math.max(told.ceiling, told.fastest ?? 0, ...log.slice(-512).map((step) => step.num_bytes / step.seconds));
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

function cachePanel(): TemplateResult {
  return html`<section class="panel" aria-label="Cache">
    <h2>Cache</h2>
    ${map
      ? html`<p class="keys">${(["private", "shared", "cached", "free"] as const).map((state) => html`<span class="key block-${state}">${state} ${count(map?.counts[state] ?? 0)}</span>`)}
          <span class="dim">outlined: yours · prefix hits ${count(map.prefix_hits)} of ${count(map.prefix_queries)} tokens · ${map.preemptions} preemptions · ${map.evictions} evictions</span></p>`
      : html`<p class="dim">Looking …</p>`}
    <div class="canvas">${cacheCanvas}</div>
    ${map?.requests.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="Requests in the cache"><table class="plain"><thead><tr><th scope="col">request</th><th scope="col">state</th><th scope="col">prompt</th><th scope="col">tokens</th><th scope="col">computed</th><th scope="col">from cache</th><th scope="col">blocks</th></tr></thead><tbody>
      ${map.requests.map((one) => html`<tr class=${mine().has(one.number) ? "mine" : ""}><td>#${one.number}</td><td>${one.state}</td><td>${one.prompt_tokens}</td><td>${one.tokens}</td><td>${one.computed}</td><td>${one.cached}</td><td>${one.blocks.length}</td></tr>`)}
    </tbody></table></div>` : nothing}
  </section>`;
}

function planTable(): TemplateResult {
  const own = mine();
  const shown = log.slice(-PLAN_ROWS).reverse();
  return html`<section class="panel" aria-label="Plan">
    <h2>Plan, step by step</h2>
    <div class="scroll tall" tabindex="0" role="region" aria-label="The scheduler's steps"><table class="plain plan">
      <thead><tr><th scope="col">step</th><th scope="col">time</th><th scope="col">what was computed</th><th scope="col">waiting</th><th scope="col">free blocks</th></tr></thead>
      <tbody>${shown.map((step) => html`<tr>
        <td>${step.number}</td><td>${milliseconds(step.seconds * 1000)}</td>
        <td>${step.works.slice(0, 12).map((work) => html`<button type="button" class="work ${isPrefill(work) ? "prefill" : "decode"} ${own.has(work.request) ? "mine" : ""}"
          title="request ${work.request}: ${work.tokens} tokens from position ${work.start}${work.samples > 1 ? `, ${work.samples - 1} of them drafted` : ""}"
          @click=${() => { selected = work.request; app.changed(); }}>#${work.request} ${isPrefill(work) ? `${work.tokens} @ ${work.start}` : work.samples > 1 ? `1+${work.samples - 1} @ ${work.start}` : `@ ${work.start}`}</button>`)}${step.works.length > 12 ? html`<span class="dim"> and ${step.works.length - 12} more</span>` : nothing}</td>
        <td>${step.waiting}</td><td>${step.blocks_free}</td></tr>`)}</tbody>
    </table></div>
  </section>`;
}

function range(): [number, number] {
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
  drawTimeline(timeline, lanes(log, mine()), from, to);
  if (map) drawCache(cacheCanvas, map, mine());
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
