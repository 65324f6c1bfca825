// Learn: the loop that makes an answer, one step at a time, on the visitor's own prompt and the live engine.

import * as api from "../api.js";
import { app } from "../app.js";
import { textOf, type Branch } from "../branches.js";
import { count, label, milliseconds, percent, visible } from "../display.js";
import { html, live, nothing, type TemplateResult } from "../dom.js";
import { chooseAgain } from "../trace.js";
import type { Done, ForkRequest, Trace } from "../types.js";

const STEPS = ["Tokenize", "Prefill", "Logits", "Select", "Append", "Stop", "With a cache", "Without a cache", "Repetition"] as const;
const TEMPERATURE = 0.8;
const SEED = 7;

let prompt = "The three primary colours are";
let step = 0;
let isBusy = false;
let tokens: { id: number; text: string }[] = [];
let prefill: Timing | null = null;
let trace: Trace | null = null;
let output: { id: number; text: string }[] = [];
let finish: string | null = null;
let cached: Timing[] = [];
let uncached: Timing[] = [];
let greedy: Branch | null = null;
let cured: Branch | null = null;

interface Timing { first: number; cached: number; prompt: number }

export function learnView(): TemplateResult {
  return html`
    <div class="learn">
      <nav class="panel" aria-label="Tour"><h2>How an answer is made</h2>
        <ol class="tour">${STEPS.map((name, index) => html`<li><button type="button" aria-current=${index === step ? "step" : nothing} class=${index < step ? "done" : ""} @click=${() => void enter(index)}>${name}</button></li>`)}</ol>
        <label class="field"><span>Your prompt</span><textarea rows="3" .value=${live(prompt)} @input=${(event: Event) => { prompt = (event.target as HTMLTextAreaElement).value; reset(); }}></textarea></label>
      </nav>
      <section class="panel lesson" aria-label=${STEPS[step] ?? ""} aria-live="polite">
        ${lesson()}
        <div class="actions">
          <button type="button" ?disabled=${step === 0 || isBusy} @click=${() => void enter(step - 1)}>Back</button>
          <button type="button" class="primary" id="next" ?disabled=${step === STEPS.length - 1 || isBusy} @click=${() => void enter(step + 1)}>Next: ${STEPS[step + 1] ?? "the end"}</button>
          ${isBusy ? html`<span class="dim">The engine works …</span>` : nothing}
        </div>
      </section>
    </div>
  `;
}

function reset(): void {
  tokens = [];
  prefill = trace = finish = greedy = cured = null;
  output = [];
  cached = [];
  uncached = [];
  step = 0;
  app.changed();
}

async function enter(next: number): Promise<void> {
  if (isBusy) return;
  step = Math.max(0, Math.min(STEPS.length - 1, next));
  isBusy = true;
  app.changed();
  try {
    await prepare(step);
  } catch (error) {
    app.fail(error);
  }
  isBusy = false;
  app.changed();
}

async function prepare(index: number): Promise<void> {
  if (!tokens.length) {
    const told = await api.tokenize({ prompt });
    tokens = told.tokens.map((id, place) => ({ id, text: told.token_strs[place] ?? "" }));
  }
  if (index >= 1 && !prefill) prefill = await time({ cache_salt: fresh() });
  if (index >= 2 && !trace) await look();
  if (index === 4 && output.length === 0) await append();
  if (index === 5 && finish === null) await finishIt();
  if (index === 6 && !cached.length) {
    const salt = fresh();
    cached = [await time({ cache_salt: salt, prompt: longer() }), await time({ cache_salt: salt, prompt: longer() })];
  }
  if (index === 7 && !uncached.length) uncached = [await time({ cache_salt: fresh(), prompt: longer() }), await time({ cache_salt: fresh(), prompt: longer() })];
  if (index === 8 && !greedy) {
    const asked = { mode: "completion" as const, prompt, messages: [], params: { max_tokens: 96, temperature: 0, ignore_eos: true } };
    greedy = app.run(asked, { quiet: true });
    cured = app.run(asked, { quiet: true, seed: SEED, params: { ...asked.params, temperature: TEMPERATURE, top_p: 0.95, dry_multiplier: 0.8 } });
  }
}

const fresh = (): string => `tour-${Math.random().toString(36).slice(2)}`;
const longer = (): string => `${prompt} `.repeat(Math.max(1, Math.ceil(1200 / (prompt.length + 1))));

/** One token of an answer: how long it took, and how much of the prompt was in the cache. */
async function time(more: ForkRequest): Promise<Timing> {
  let done: Done | null = null;
  const body = { prompt, max_tokens: 1, temperature: 0, ...more };
  for await (const event of api.fork(body, new AbortController().signal)) {
    if ("error" in event) throw new Error(event.error.message);
    if (event.object === "fork.done") done = event;
  }
  if (!done) throw new Error("The answer has no end.");
  return { first: (done.unspool.timings?.first_token ?? NaN) * 1000, cached: done.unspool.cached_tokens, prompt: done.usage.prompt_tokens };
}

const ids = (): number[] => output.map((token) => token.id);

async function look(): Promise<void> {
  const told = await api.whatIf({ prompt: tokens.map((token) => token.id), output: ids(), temperature: TEMPERATURE, top_p: 0.95, seed: SEED, trace_top: 12 });
  trace = told.trace;
}

async function append(): Promise<void> {
  if (!trace) return;
  const id = trace.token;
  if (app.caps?.end_ids.includes(id)) {
    finish = "eos";
    return;
  }
  output = [...output, { id, text: trace.texts[String(id)] ?? "" }];
  await look();
}

async function finishIt(): Promise<void> {
  const body = { prompt: tokens.map((token) => token.id), output: ids(), temperature: TEMPERATURE, top_p: 0.95, seed: SEED, max_tokens: output.length + 40 };
  output = [];
  for await (const event of api.fork(body, new AbortController().signal)) {
    if ("error" in event) throw new Error(event.error.message);
    if (event.object === "fork.tokens") output = [...output, ...event.tokens.filter((token) => token.special === undefined).map(({ id, text }) => ({ id, text }))];
    if (event.object === "fork.end") finish = event.finish_reason;
    app.changed();
  }
}

async function oneMore(): Promise<void> {
  isBusy = true;
  app.changed();
  try {
    await append();
  } catch (error) {
    app.fail(error);
  }
  isBusy = false;
  app.changed();
}

function lesson(): TemplateResult {
  switch (STEPS[step]) {
    case "Tokenize":
      return html`<h3>1 · Tokenize</h3>
        <p>A model reads numbers. The tokenizer cuts the text into pieces of its vocabulary of ${count(app.caps?.vocab_size ?? 0)} tokens, and each piece has a number.</p>
        ${chips(tokens)}
        ${tokens.length ? html`<p>${tokens.length} tokens for ${[...prompt].length} characters.</p>` : html`<p><button type="button" class="primary" @click=${() => void enter(0)}>Tokenize it</button></p>`}`;
    case "Prefill":
      return html`<h3>2 · Prefill</h3>
        <p>The whole prompt goes through the model at once. For each token and layer it leaves a key and a value in the cache, so nothing of it is computed again.</p>
        ${prefill ? html`<p class="big">${prefill.prompt} tokens in ${milliseconds(prefill.first)}</p><p class="dim">${bytesOfCache(prefill.prompt)}</p>` : nothing}`;
    case "Logits":
      return html`<h3>3 · Logits</h3>
        <p>After the last token stands one number for every token of the vocabulary: how well it would follow. Turned into probabilities, the best are these.</p>
        ${trace ? html`${bars(trace)}<p>Entropy ${trace.entropy_bits.toFixed(2)} bits: the model is about as undecided as among ${Math.pow(2, trace.entropy_bits).toFixed(1)} equal choices.</p>` : nothing}`;
    case "Select":
      return html`<h3>4 · Select</h3>
        <p>Stages reshape the distribution: here a temperature of ${TEMPERATURE} sharpens it, and top_p 0.95 removes the unlikely rest. Then each survivor gets noise, a pure function of seed, position and token; the best sum wins.</p>
        ${trace ? selection(trace) : nothing}`;
    case "Append":
      return html`<h3>5 · Append</h3>
        <p>The chosen token joins the text, goes through the model alone (its past is in the cache), and the loop starts over. Each turn reads all the weights once: that is why generation is limited by memory bandwidth.</p>
        ${chips(tokens, output)}
        <p><button type="button" id="append" @click=${() => void oneMore()} ?disabled=${isBusy || finish !== null}>One more turn</button></p>
        ${trace ? bars(trace) : nothing}`;
    case "Stop":
      return html`<h3>6 · Stop</h3>
        <p>The loop ends when the model chooses an end token, when a stop string appears, or at the length that was asked for.</p>
        ${chips(tokens, output)}
        ${finish ? html`<p class="big">Finish reason: ${finish}</p>` : nothing}`;
    case "With a cache":
      return html`<h3>7 · With a cache</h3>
        <p>The same long prompt twice. The second time its blocks are found in the prefix cache.</p>${timings(cached)}`;
    case "Without a cache":
      return html`<h3>8 · Without a cache</h3>
        <p>The same prompt twice again, each time with a cache salt of its own, so that nothing is shared: the second time costs as much as the first.</p>${timings(uncached)}`;
    default:
      return html`<h3>9 · Repetition</h3>
        <p>Always taking the best token leads small models into loops: what was said once becomes likelier each time. A temperature, and a penalty such as DRY for what would continue a repetition, leads out of it.</p>
        <div class="two">
          <div class="column"><h4>greedy: temperature 0</h4><p dir="auto" id="greedy">${greedy ? visible(textOf(greedy.tokens)) : ""}</p>${repeats(greedy)}</div>
          <div class="column"><h4>temperature ${TEMPERATURE}, dry_multiplier 0.8</h4><p dir="auto" id="cured">${cured ? visible(textOf(cured.tokens)) : ""}</p>${repeats(cured)}</div>
        </div>
        ${greedy && greedy.state !== "running" ? html`<p><button type="button" @click=${() => { if (greedy) app.show(greedy); app.go("write"); }}>Look at the loop in Write</button></p>` : nothing}`;
  }
}

function chips(first: { id: number; text: string }[], then: { id: number; text: string }[] = []): TemplateResult {
  const chip = (token: { id: number; text: string }, kind: string): TemplateResult => html`<span class="chip ${kind}"><span class="token">${label(token.text)}</span><small>${token.id}</small></span>`;
  return html`<p class="chips">${first.map((token) => chip(token, ""))}${then.map((token) => chip(token, "new"))}</p>`;
}

function bars(told: Trace): TemplateResult {
  return html`<ul class="distribution">${told.alternatives.slice(0, 8).map(([id, p]) => html`<li class=${id === told.token ? "chosen" : ""}>
    <span class="token">${label(told.texts[String(id)] ?? "", 18)}</span><span class="bar" .style=${`--w:${p}`}></span><span>${percent(p)}</span></li>`)}</ul>`;
}

function selection(told: Trace): TemplateResult {
  const { winner } = chooseAgain(told);
  return html`<ol class="stages">${told.stages.map((stage) => html`<li><span class="name">${stage.name}</span><span class="value">${String(stage.value)}</span><span class="left">${count(stage.survivors)} left</span><span class="mass">${percent(stage.mass)}</span></li>`)}</ol>
    <table class="plain"><thead><tr><th scope="col">token</th><th scope="col">logit</th><th scope="col">noise</th><th scope="col">sum</th></tr></thead><tbody>
      ${told.candidates.slice(0, 6).map((one) => html`<tr class=${one.token === winner ? "mine" : ""}><td><span class="token">${label(told.texts[String(one.token)] ?? "")}</span></td><td>${one.logit.toFixed(3)}</td><td>${one.gumbel.toFixed(3)}</td><td>${one.score.toFixed(3)}</td></tr>`)}
    </tbody></table>`;
}

function timings(told: Timing[]): TemplateResult {
  return html`<table class="plain" id="timings"><thead><tr><th scope="col"></th><th scope="col">prompt</th><th scope="col">from the cache</th><th scope="col">first token after</th></tr></thead><tbody>
    ${told.map((one, index) => html`<tr><th scope="row">${index === 0 ? "first time" : "second time"}</th><td>${one.prompt} tokens</td><td>${one.cached} tokens</td><td>${milliseconds(one.first)}</td></tr>`)}</tbody></table>`;
}

function bytesOfCache(num: number): string {
  const each = app.machine?.kv_bytes_per_token;
  return each ? `Their keys and values take ${((each * num) / 1000).toFixed(1)} kB of the cache.` : "";
}

/** How much of a text is a repetition of itself: the share of its last tokens that stood before with the same three before them. */
export function repeated(idsOf: readonly number[]): number {
  const seen = new Set<string>();
  let again = 0;
  for (let index = 3; index < idsOf.length; index++) {
    const gram = idsOf.slice(index - 3, index + 1).join();
    if (seen.has(gram)) again += 1;
    seen.add(gram);
  }
  return idsOf.length > 3 ? again / (idsOf.length - 3) : 0;
}

function repeats(branch: Branch | null): TemplateResult {
  if (!branch) return html``;
  if (branch.error) return html`<p class="error">${branch.error}</p>`;
  return html`<p class="dim">${branch.state === "running" ? "writing …" : `${percent(repeated(branch.tokens.map((token) => token.id)))} of its tokens repeat what stood before`}</p>`;
}
