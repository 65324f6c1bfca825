// Why this token: the step behind a token, and what other parameters would have made of it.

import * as api from "../api.js";
import { app } from "../app.js";
import { gapBefore, type Branch } from "../branches.js";
import { count, label, labelOf, milliseconds, percent } from "../display.js";
import { debounce, html, nothing, repeat, type TemplateResult } from "../dom.js";
import { SLIDERS } from "../params.js";
import { chooseAgain, choices, rows, type Row } from "../trace.js";
import type { ForkRequest, Params, Token, Trace, WhatIf } from "../types.js";

const TURNED = ["temperature", "top_k", "top_p", "min_p"] as const;
const FOLLOWED = 256; // of the likeliest tokens, through every stage
const MOST_ROWS = 16;
const MOST_REMOVED = 4; // shown of each stage, beside those

interface State {
  branch: Branch;
  owner: Branch; // by whose seed and parameters the token was chosen
  index: number;
  exact: WhatIf | null; // the step as it was, over the full vocabulary
  turned: Params; // what the sliders say; empty: nothing was turned
  hypothetical: WhatIf | null;
  isAsking: boolean;
  error: string | null;
  typed: string;
  all: boolean;
}

let state: State | null = null;
let asking: AbortController | null = null;

/** The fields of /v1/whatif for a place in a branch. */
export function stepBody(branch: Branch, index: number, turned: Params = {}): ForkRequest {
  const { max_tokens: _length, ...params } = { ...branch.asked.params, ...turned };
  const body: ForkRequest = {
    prompt: branch.prompt,
    is_chat: branch.asked.mode === "chat",
    ...params,
    output: branch.tokens.slice(0, index).map((token) => token.id),
    trace_top: FOLLOWED,
  };
  for (const name of ["beam", "n", "best_of"]) delete body[name];
  if (branch.seed !== null) body["seed"] = branch.seed;
  const chosen = branch.tokens[index];
  if (chosen) body["trace_tokens"] = [chosen.id];
  return body;
}

async function ask(turned: Params): Promise<void> {
  const mine = state;
  if (!mine) return;
  asking?.abort();
  asking = new AbortController();
  mine.isAsking = true;
  app.changed();
  try {
    const answer = await api.whatIf(stepBody(mine.owner, mine.index, turned), asking.signal);
    if (state !== mine) return;
    if (Object.keys(turned).length) mine.hypothetical = answer;
    else mine.exact = answer;
    mine.error = null;
    mine.isAsking = false;
  } catch (error) {
    if (error instanceof DOMException) return;
    mine.error = error instanceof Error ? error.message : String(error);
    mine.isAsking = false;
  }
  app.changed();
}

const askSoon = debounce(60, (turned: Params) => void ask(turned));

function stateFor(branch: Branch, index: number): State {
  const isNew = state?.branch !== branch || state.index !== index;
  if (state === null || isNew)
    state = { branch, owner: app.tree.ownerOf(branch, index), index, exact: null, turned: {}, hypothetical: null, isAsking: false, error: null, typed: "", all: false };
  const { owner } = state;
  // A seed that is drawn is known once the answer has begun; that of a further sibling, when it has ended.
  const isKnown = owner.prompt.length > 0 && owner.seed !== null && owner.params["beam"]?.value == null;
  if (isKnown && !state.exact && !state.isAsking && !state.error) void ask({});
  return state;
}

function turn(name: string, value: number): void {
  if (!state) return;
  state.turned = { ...state.turned, [name]: value };
  askSoon(state.turned);
  app.changed();
}

/** Go on from here with another token; it is shown at once. */
export function branchWith(branch: Branch, index: number, tokens: Token[], params?: Params): void {
  const options = { parent: branch, at: index, more: tokens, ...(params ? { params } : {}) };
  app.run(branch.asked, options);
  app.select(index);
}

function tokenOf(trace: Trace, id: number, branch: Branch, index: number): Token {
  const text = trace.texts[String(id)] ?? "";
  const probability = new Map(trace.alternatives).get(id);
  const like = branch.tokens[index]?.top;
  const special = app.caps?.special_tokens[String(id)];
  return {
    id,
    text: special === undefined ? text : "",
    ...(special === undefined ? {} : { special }),
    ...(probability === undefined ? {} : { logprob: Math.log(probability), rank: trace.alternatives.findIndex(([one]) => one === id) + 1 }),
    ...(like ? { top: like } : {}),
  };
}

async function branchWithTyped(mine: State): Promise<void> {
  if (!mine.typed) return;
  try {
    const { tokens, token_strs: texts } = await api.tokenize({ prompt: mine.typed, add_special_tokens: false });
    branchWith(mine.branch, mine.index, tokens.map((id, place) => ({ id, text: texts[place] ?? "" })));
  } catch (error) {
    app.fail(error);
  }
}

export function stepPanel(): TemplateResult {
  const branch = app.current;
  const index = app.cursor;
  if (!branch || index === null || !(branch.tokens[index] ?? index === branch.tokens.length))
    return html`<aside class="step empty" aria-label="Why this token">
      <h2>Why this token</h2>
      <p>Hover over a token to see what else could have come. Click one, or use the arrow keys, to see how it was chosen and to go on from there in another way.</p>
    </aside>`;
  const mine = stateFor(branch, index);
  const token = branch.tokens[index];
  const trace = mine.exact?.trace ?? token?.trace ?? null;
  const isTurned = Object.keys(mine.turned).length > 0;
  const shown = isTurned && mine.hypothetical ? mine.hypothetical.trace : trace;
  return html`
    <aside class="step" aria-label="Why this token" data-index=${index}>
      <header>
        <h2>Why this token</h2>
        <div class="steppers">
          <button type="button" aria-label="Previous token" ?disabled=${index === 0} @click=${() => app.select(index - 1)}>‹</button>
          <span>${index + 1} of ${branch.tokens.length}</span>
          <button type="button" aria-label="Next token" ?disabled=${index >= branch.tokens.length - 1} @click=${() => app.select(index + 1)}>›</button>
          <button type="button" aria-label="Close" @click=${() => app.select(null)}>×</button>
        </div>
      </header>
      ${token ? facts(token, trace, branch, index) : nothing}
      ${mine.error ? html`<p class="error" role="alert">${mine.error}</p>` : nothing}
      ${trace ? sliders(mine) : nothing}
      ${isTurned && shown ? verdict(mine, shown) : nothing}
      ${shown ? stages(shown) : mine.isAsking ? html`<p class="dim">Scoring this position again …</p>` : nothing}
      ${shown ? draw(shown, isTurned) : nothing}
      ${shown && token?.given && !isTurned ? html`<p class="dim small">This is what the model would have chosen; <span class="token">${labelOf(token)}</span> was put there by hand.</p>` : nothing}
      ${shown ? table(mine, shown, token?.id ?? null, isTurned) : nothing}
      ${token ? typing(mine) : nothing}
    </aside>
  `;
}

function facts(token: Token, trace: Trace | null, branch: Branch, index: number): TemplateResult {
  const gap = gapBefore(branch, index);
  const p = trace && trace.token === token.id ? trace.raw_probability : token.logprob === undefined ? null : Math.exp(token.logprob);
  return html`
    <p class="chosen-token"><span class="token">${labelOf(token, 48)}</span> <span class="dim">id ${token.id}${token.given ? " · given by hand" : ""}</span></p>
    <dl class="facts">
      <div><dt>Probability</dt><dd>${p === null ? "–" : percent(p)}</dd></div>
      <div><dt>Rank</dt><dd>${trace && trace.token === token.id ? trace.raw_rank : token.rank ?? "–"}</dd></div>
      <div><dt>Entropy</dt><dd title=${trace ? `like ${choices(trace.entropy_bits).toFixed(1)} equally likely tokens, over the full vocabulary` : ""}>
        ${trace ? `${trace.entropy_bits.toFixed(2)} bits` : "–"}</dd></div>
      <div><dt>Time</dt><dd>${milliseconds(gap)}</dd></div>
    </dl>
  `;
}

function inForce(mine: State, name: string): number {
  const value = mine.turned[name] ?? mine.owner.params[name]?.value;
  return typeof value === "number" ? value : 0;
}

function sliders(mine: State): TemplateResult {
  const isTurned = Object.keys(mine.turned).length > 0;
  return html`
    <fieldset class="sliders">
      <legend>What if</legend>
      ${TURNED.map((name) => {
        const range = SLIDERS[name] ?? { min: 0, max: 1, step: 0.01 };
        const value = inForce(mine, name);
        return html`<label class=${mine.turned[name] === undefined ? "" : "turned"}>
          <span>${name}</span>
          <input type="range" min=${range.min} max=${range.max} step=${range.step} .value=${String(value)}
            data-whatif=${name} @input=${(event: Event) => turn(name, Number((event.target as HTMLInputElement).value))} />
          <output>${value}</output>
        </label>`;
      })}
      ${isTurned
        ? html`<button type="button" @click=${() => { mine.turned = {}; mine.hypothetical = null; asking?.abort(); mine.isAsking = false; app.changed(); }}>Back to what it was</button>`
        : nothing}
    </fieldset>
  `;
}

function verdict(mine: State, shown: Trace): TemplateResult {
  const now = mine.branch.tokens[mine.index];
  const names = Object.entries(mine.turned).map(([name, value]) => `${name} ${String(value)}`).join(", ");
  const isSame = now?.id === shown.token;
  return html`<p class="hypothetical" role="status">
    <b>Hypothetical.</b>
    With ${names} it would have been <span class="token">${label(shown.texts[String(shown.token)] ?? "")}</span>${isSame ? ", the same." : "."}
    ${isSame
      ? nothing
      : html`<button type="button" @click=${() => branchWith(mine.branch, mine.index, [], { ...mine.owner.asked.params, ...mine.turned })}>Go on that way</button>`}
    ${mine.isAsking ? html`<span class="dim">…</span>` : nothing}
  </p>`;
}

function stages(trace: Trace): TemplateResult {
  let before = app.caps?.vocab_size ?? 0;
  return html`
    <h3>Stages</h3>
    <ol class="stages">
      <li class="head" aria-hidden="true"><span>stage</span><span>value</span><span>tokens</span><span class="mass">mass left</span></li>
      <li><span class="name">model</span><span class="value">raw</span><span class="left">${count(before)}</span><span class="mass">100%</span></li>
      ${trace.stages.map((stage) => {
        const removed = before - stage.survivors;
        before = stage.survivors;
        return html`<li>
          <span class="name">${stage.name}</span>
          <span class="value">${valueText(stage.value)}</span>
          <span class="left">${count(stage.survivors)} left${removed > 0 ? html`<span class="dim"> · ${count(removed)} removed</span>` : nothing}</span>
          <span class="mass" title="of the probability that was there when the stage began">${percent(stage.mass)}</span>
        </li>`;
      })}
    </ol>
  `;
}

function valueText(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(Math.round(value * 1e6) / 1e6);
  const text = JSON.stringify(value);
  return text.length > 40 ? text.slice(0, 39) + "…" : text;
}

function draw(trace: Trace, isHypothetical: boolean): TemplateResult {
  const again = chooseAgain(trace);
  const [best, second] = trace.candidates;
  const name = (id: number): string => label(trace.texts[String(id)] ?? `#${id}`);
  const holds = again.winner === trace.token;
  return html`
    <h3>${trace.greedy ? "Choice" : "Draw"}</h3>
    <p class="draw" data-winner=${again.winner} data-hypothetical=${isHypothetical ? "yes" : "no"}>
      <span class="token">${name(again.winner)}</span>
      ${best ? html`<span class="sum">${best.logit.toFixed(3)}${trace.greedy ? nothing : html` + noise ${best.gumbel.toFixed(3)} = ${best.score.toFixed(3)}`}</span>` : nothing}
      ${second ? html`<span class="dim">ahead of</span> <span class="token">${name(second.token)}</span> <span class="sum">${second.score.toFixed(3)}</span>` : html`<span class="dim">nothing else was left</span>`}
      <span class=${holds ? "ok" : "error"}>${holds ? "✓ chosen again from these numbers" : "✗ these numbers choose another token"}</span>
      ${trace.greedy ? nothing : html`<span class="dim">noise of seed ${trace.seed}, position ${trace.position}</span>`}
    </p>
  `;
}

function table(mine: State, trace: Trace, chosen: number | null, isHypothetical: boolean): TemplateResult {
  const found = rows(trace);
  const few = mine.all ? found : mostTelling(found, chosen, trace.token);
  return html`
    <h3>Candidates</h3>
    <div class="scroll" tabindex="0" role="region" aria-label="Candidates">
      <table class="candidates">
        <thead><tr><th scope="col">token</th><th scope="col">raw</th><th scope="col">final</th><th scope="col">noise</th><th scope="col">score</th><th scope="col"><span class="offscreen">branch</span></th></tr></thead>
        <tbody>${repeat(few, (row) => row.token, (row) => candidate(mine, trace, row, chosen, isHypothetical))}</tbody>
      </table>
    </div>
    ${found.length > few.length || mine.all
      ? html`<button type="button" class="quiet" @click=${() => { mine.all = !mine.all; app.changed(); }}>${mine.all ? "Fewer" : `All ${found.length}`}</button>`
      : nothing}
  `;
}

/** The likeliest, the one that was chosen, and the first that each stage removed. */
function mostTelling(found: Row[], ...chosen: (number | null)[]): Row[] {
  const removed = new Map<string, number>();
  return found.filter((row, place) => {
    const number = row.removedBy === null ? 0 : (removed.get(row.removedBy) ?? 0) + 1;
    if (row.removedBy !== null) removed.set(row.removedBy, number);
    return place < MOST_ROWS || chosen.includes(row.token) || (number > 0 && number <= MOST_REMOVED);
  });
}

function candidate(mine: State, trace: Trace, row: Row, chosen: number | null, isHypothetical: boolean): TemplateResult {
  const isWinner = row.token === trace.token;
  const kind = `${row.removedBy ? "removed" : ""} ${isWinner ? "winner" : ""} ${row.token === chosen ? "chosen" : ""}`;
  return html`<tr class=${kind} data-token=${row.token}>
    <th scope="row"><span class="token">${label(row.text, 18)}</span>${isWinner ? html`<span class="mark" title="the best score">●</span>` : nothing}</th>
    <td class="p">${row.raw === null ? "" : html`<span class="bar" .style=${`--w:${row.raw}`}></span><span>${percent(row.raw)}</span>`}</td>
    <td>${row.removedBy ? html`<span class="by">✗ ${row.removedBy}</span>` : row.final === null ? "" : percent(row.final)}</td>
    <td>${row.noise === null || trace.greedy ? "" : row.noise.toFixed(2)}</td>
    <td>${row.score === null ? "" : row.score.toFixed(2)}</td>
    <td>${row.token === chosen && !isHypothetical
      ? nothing
      : html`<button type="button" class="branch" title="Go on from here with this token" aria-label="Branch with ${label(row.text)}"
          @click=${() => branchWith(mine.branch, mine.index, [tokenOf(trace, row.token, mine.branch, mine.index)])}>${forkIcon()}</button>`}</td>
  </tr>`;
}

const forkIcon = (): TemplateResult => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d="M4 2v12M4 9c0-3 8-1 8-5M9.5 5.5 12 3l2.5 2.5" /></svg>`;

function typing(mine: State): TemplateResult {
  return html`<form class="typing" @submit=${(event: Event) => { event.preventDefault(); void branchWithTyped(mine); }}>
    <label for="typed">Go on with</label>
    <input id="typed" type="text" spellcheck="false" autocomplete="off" placeholder="any text, blanks count" .value=${mine.typed}
      @input=${(event: Event) => { mine.typed = (event.target as HTMLInputElement).value; }} />
    <button type="submit">Branch</button>
  </form>`;
}
