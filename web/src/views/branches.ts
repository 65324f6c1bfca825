// What if: the tree of branches, siblings, beam search, and two branches side by side.

import { hierarchy, tree as layout, type HierarchyPointNode } from "d3-hierarchy";
import { app } from "../app.js";
import { beamTree, firstDifference, segments, textOf, totalLogprob, type BeamNode, type Branch, type Segment } from "../branches.js";
import { excerpt, label, labelOf, percent, visible } from "../display.js";
import { html, live, nothing, svg, type TemplateResult } from "../dom.js";
import { OWN } from "../params.js";
import type { Params, Token } from "../types.js";
import { stepPanel } from "./step.js";
import { summary } from "./write.js";

let siblings = 3;
let width = 4;
let compared: [number | null, number | null] = [null, null];
let changes = "";
let beams: Branch[] = [];

const ROW = 30;
const COLUMN = 190;

export function branchesView(): TemplateResult {
  const current = app.current;
  if (!current)
    return html`<section class="panel"><h2>What if</h2><p>Run something in <a href="#write" @click=${go("write")}>Write</a> first. Its branches grow here.</p></section>`;
  return html`
    <div class="branches three">
      <section class="panel wide" aria-label="Branches">
        <header><h2>Branches</h2>
          <p class="dim">Click a branch, or walk with <kbd>Alt</kbd> and the arrows: left to where it came from, right to what grew from it, up and down among its like.</p></header>
        ${treePicture(current)}
        <div class="tools">
          <form class="inline" @submit=${(event: Event) => { event.preventDefault(); grow(current); }}>
            <label>Siblings <input type="number" id="siblings" min="1" max="16" .value=${live(String(siblings))} @input=${(event: Event) => { siblings = number(event, siblings); }} /></label>
            <button type="submit" id="grow">Generate ${cursorText(current)}</button>
          </form>
          <form class="inline" @submit=${(event: Event) => { event.preventDefault(); search(current); }}>
            <label>Beam width <input type="number" id="width" min="2" max="16" .value=${live(String(width))} @input=${(event: Event) => { width = number(event, width); }} /></label>
            <button type="submit" id="beam">Search</button>
          </form>
          ${app.tree.list().length > 1 ? html`<button type="button" @click=${() => forget(current)}>Forget this branch</button>` : nothing}
        </div>
        ${beams.length ? beamPicture() : nothing}
        ${comparison(current)}
      </section>
      <section class="panel" aria-label="This branch">
        <h2>This branch</h2>
        <p class="branch-text" dir="auto">${withFork(current)}</p>
        ${summary(current)}
        ${current.error ? html`<p class="error" role="alert">${current.error}</p>` : nothing}
      </section>
      ${stepPanel()}
    </div>
  `;
}

const go = (view: "write") => (event: Event): void => { event.preventDefault(); app.go(view); };
const number = (event: Event, old: number): number => Math.min(16, Math.max(1, Math.round(Number((event.target as HTMLInputElement).value)) || old));

function cursorText(branch: Branch): string {
  return app.cursor === null ? "from the start" : `from token ${Math.min(app.cursor, branch.tokens.length) + 1}`;
}

function withFork(branch: Branch): TemplateResult {
  if (branch.parent === null) return html`${visible(textOf(branch.tokens))}`;
  return html`<span class="dim">${visible(textOf(branch.tokens.slice(0, branch.at)))}</span><mark>${visible(textOf(branch.tokens.slice(branch.at, branch.at + 1)))}</mark>${visible(textOf(branch.tokens.slice(branch.at + 1)))}`;
}

function grow(branch: Branch): void {
  const made = app.runMany(branch.asked, siblings, { parent: branch, at: app.cursor ?? 0, seed: newSeed() });
  if (made[0]) app.show(made[0], app.cursor);
}

function newSeed(): number {
  return Math.floor(Math.random() * 2 ** 32);
}

function search(branch: Branch): void {
  const { temperature: _t, top_p: _p, top_k: _k, min_p: _m, ...params } = branch.asked.params;
  const length = Math.min(24, Number(params["max_tokens"] ?? 24));
  beams = app.runMany(branch.asked, width, { params: { ...params, max_tokens: length, beam: { width } } });
  app.changed();
}

function forget(branch: Branch): void {
  const next = app.tree.get(branch.parent) ?? app.tree.list().find((one) => one !== branch && one.parent !== branch.id) ?? null;
  app.tree.remove(branch);
  beams = beams.filter((one) => app.tree.get(one.id));
  if (next && app.tree.get(next.id)) app.show(next);
  else {
    app.current = app.tree.list()[0] ?? null;
    app.changed();
  }
}

/** Alt and the arrows, anywhere in the page. True: the key was for us. */
export function walk(event: KeyboardEvent): boolean {
  const directions: Record<string, "left" | "right" | "up" | "down"> = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" };
  const direction = directions[event.key];
  if (!event.altKey || !direction || !app.current) return false;
  const next = app.tree.step(app.current, direction);
  if (next) app.show(next, next.parent === null ? null : next.at);
  return true;
}

// Pictures -----------------------------------------------------------------------------------------------------------
interface Drawn<T> { nodes: HierarchyPointNode<T>[]; width: number; height: number }

function place<T>(root: T, children: (node: T) => T[]): Drawn<T> {
  const top = layout<T>().nodeSize([ROW, COLUMN])(hierarchy(root, children));
  const nodes = top.descendants();
  const low = Math.min(...nodes.map((node) => node.x));
  for (const node of nodes) node.x -= low - ROW / 2;
  const height = Math.max(...nodes.map((node) => node.x)) + ROW / 2 + 4;
  return { nodes, width: Math.max(...nodes.map((node) => node.y)) + COLUMN, height };
}

function links<T>(drawn: Drawn<T>): TemplateResult[] {
  return drawn.nodes.filter((node) => node.parent).map((node) => {
    const from = node.parent;
    const x = (from?.y ?? 0) + COLUMN - 20;
    const middle = (x + node.y) / 2;
    return svg`<path class="link" d="M${x},${from?.x ?? 0}C${middle},${from?.x ?? 0} ${middle},${node.x} ${node.y},${node.x}" />`;
  });
}

function treePicture(current: Branch): TemplateResult {
  const roots = app.tree.roots();
  const path = new Set<number>();
  for (let here: Branch | null = current; here; here = app.tree.get(here.parent)) path.add(here.id);
  return html`<div class="picture" role="group" aria-label="Tree of branches" tabindex="0">
    ${roots.map((root, run) => {
      const drawn = place(segments(app.tree, root), (node) => node.children);
      return html`<div class="run"><span class="run-name">Run ${run + 1}${root.seed === null ? "" : ` · seed ${root.seed}`}</span>
        <svg width=${drawn.width} height=${drawn.height} viewBox="0 0 ${drawn.width} ${drawn.height}" aria-hidden="false">
          ${links(drawn)}${drawn.nodes.map((node) => segmentNode(node.data, node.y, node.x, current, path))}
        </svg></div>`;
    })}
  </div>`;
}

function segmentNode(segment: Segment, x: number, y: number, current: Branch, path: Set<number>): TemplateResult {
  const branch = app.tree.get(segment.branch);
  if (!branch) return svg``;
  const text = excerpt(textOf(branch.tokens.slice(segment.from, segment.to)), 21);
  const isCurrent = segment.leaves.includes(current.id);
  const show = (): void => app.show(branch, segment.from === 0 ? null : segment.from);
  const name = `${isCurrent ? "Current branch" : "Branch"}: ${excerpt(textOf(branch.tokens.slice(segment.from, segment.to)), 60)}`;
  return svg`<g class="node ${isCurrent ? "current" : ""} ${path.has(segment.branch) ? "path" : ""} ${branch.state}" role="button" tabindex="0" aria-label=${name}
      transform="translate(${x},${y - 12})" @click=${show} @keydown=${(event: KeyboardEvent) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(); } }}>
    <rect width=${COLUMN - 20} height="24" rx="5" />
    <text x="8" y="16.5">${text}</text>
  </g>`;
}

function beamPicture(): TemplateResult {
  const running = beams.some((branch) => branch.state === "running");
  const failed = beams.find((branch) => branch.error);
  if (failed) return html`<section class="beams"><h3>Beam search</h3><p class="error" role="alert">${failed.error}</p></section>`;
  if (running) return html`<section class="beams"><h3>Beam search</h3><p class="dim">Searching …</p></section>`;
  const root = joined(beamTree(beams));
  const drawn = place(root, (node) => node.children);
  return html`<section class="beams" aria-label="Beam search">
    <h3>Beam search</h3>
    <div class="picture" tabindex="0" role="group" aria-label="Tree of hypotheses"><svg width=${drawn.width} height=${drawn.height} viewBox="0 0 ${drawn.width} ${drawn.height}">
      ${links(drawn)}
      ${drawn.nodes.map((node) => svg`<g class="node ${node.data.ends.includes(0) ? "current" : ""}" transform="translate(${node.y},${node.x - 12})">
        <rect width=${COLUMN - 20} height="24" rx="5" /><text x="8" y="16.5">${excerpt(node.data.text || "prompt", 15)}</text>
        <text class="score" x=${COLUMN - 26} y="16.5" text-anchor="end">${node.data.logprob === 0 ? "" : node.data.logprob.toFixed(1)}</text></g>`)}
    </svg></div>
    <table class="plain"><thead><tr><th scope="col">place</th><th scope="col">score</th><th scope="col">logprob</th><th scope="col">answer</th></tr></thead><tbody>
      ${beams.map((branch, index) => html`<tr><td>${index + 1}</td><td>${scoreOf(branch, index)}</td><td>${totalLogprob(branch.tokens).sum.toFixed(2)}</td>
        <td><button type="button" class="quiet text-button" @click=${() => app.show(branch)}>${excerpt(textOf(branch.tokens), 240)}</button></td></tr>`)}
    </tbody></table>
  </section>`;
}

function scoreOf(branch: Branch, index: number): string {
  const score = branch.report?.choices.find((one) => one.index === index)?.details?.["beam_score"];
  return typeof score === "number" ? score.toFixed(4) : "–";
}

interface Joined { text: string; logprob: number; ends: number[]; children: Joined[] }

/** Tokens without a choice between them become one node. */
function joined(node: BeamNode): Joined {
  let text = node.token?.text ?? "";
  let here = node;
  while (here.children.length === 1 && here.ends.length === 0 && here.children[0]) {
    here = here.children[0];
    text += here.token?.text ?? "";
  }
  return { text, logprob: here.logprob, ends: here.ends, children: here.children.map(joined) };
}

// Side by side -------------------------------------------------------------------------------------------------------
function comparison(current: Branch): TemplateResult {
  const all = app.tree.list();
  const a = app.tree.get(compared[0]) ?? current;
  const other = app.tree.get(compared[1]) ?? likeliestPartner(a, all);
  return html`<section class="compare" aria-label="Side by side">
    <h3>Side by side</h3>
    <form class="inline" @submit=${(event: Event) => { event.preventDefault(); runChanged(a); }}>
      ${picker("A", a, all, 0)} ${picker("B", other, all, 1)}
      <label>or run A with <input id="changes" type="text" spellcheck="false" placeholder='temperature=0 or seed=5' .value=${live(changes)} @input=${(event: Event) => { changes = (event.target as HTMLInputElement).value; }} /></label>
      <button type="submit" id="run-changed">Run as B</button>
    </form>
    ${other && other !== a ? sideBySide(a, other) : html`<p class="dim">Choose two branches, or run this one again with other parameters or another seed.</p>`}
  </section>`;
}

/** What one would compare a branch with: its parent, else one of its tree, else the last one of the same prompt. */
function likeliestPartner(a: Branch, all: readonly Branch[]): Branch | null {
  const family = app.tree.family(a).filter((one) => one !== a);
  const alike = all.filter((one) => one !== a && String(one.prompt) === String(a.prompt));
  return app.tree.get(a.parent) ?? family.at(-1) ?? alike.at(-1) ?? all.filter((one) => one !== a).at(-1) ?? null;
}

function picker(name: string, chosen: Branch | null, all: Branch[], place: 0 | 1): TemplateResult {
  return html`<label>${name} <select @change=${(event: Event) => { compared[place] = Number((event.target as HTMLSelectElement).value); app.changed(); }}>
    ${all.map((one) => html`<option value=${one.id} ?selected=${one === chosen}>#${one.id} ${excerpt(textOf(one.tokens.slice(one.at)), 24)}</option>`)}
  </select></label>`;
}

/** `temperature=0 seed=5` as parameters. */
export function parseChanges(text: string): Params {
  const found: Params = {};
  for (const part of text.split(/[\s,;]+/).filter(Boolean)) {
    const [name, value] = part.split("=");
    if (!name || value === undefined) throw new Error(`“${part}” is not of the form name=value.`);
    try {
      found[name] = JSON.parse(value);
    } catch {
      found[name] = value;
    }
  }
  return found;
}

function runChanged(a: Branch): void {
  try {
    const { seed, ...params } = parseChanges(changes);
    if (!Object.keys(params).length && seed === undefined) throw new Error("Say what shall differ, as in temperature=0 or seed=5.");
    const b = app.run(a.asked, { params: { ...a.asked.params, ...params }, seed: typeof seed === "number" ? seed : a.seed, quiet: true });
    compared = [a.id, b.id];
    app.changed();
  } catch (error) {
    app.fail(error);
  }
}

function sideBySide(a: Branch, b: Branch): TemplateResult {
  const index = firstDifference(a.tokens, b.tokens);
  const differing = [...new Set([...Object.keys(a.params), ...Object.keys(b.params)])].filter(
    (name) => !OWN.has(name) && JSON.stringify(a.params[name]?.value) !== JSON.stringify(b.params[name]?.value));
  return html`
    <p role="status" class="difference" data-index=${index ?? "none"}>${index === null
      ? "The answers are equal."
      : html`First difference at token ${index + 1}: <span class="token">${labelAt(a, index)}</span> in A, <span class="token">${labelAt(b, index)}</span> in B.`}
      ${String(a.prompt) === String(b.prompt) ? nothing : html`<span class="dim">The prompts differ.</span>`}
      ${differing.length ? html`<span class="dim">Parameters that differ: ${differing.map((name) => `${name} (${JSON.stringify(a.params[name]?.value)}, ${JSON.stringify(b.params[name]?.value)})`).join("; ")}</span>` : nothing}</p>
    <div class="two">${column("A", a, index)}${column("B", b, index)}</div>
  `;
}

function labelAt(branch: Branch, index: number): string {
  const token = branch.tokens[index];
  return token ? labelOf(token) : "the end";
}

function column(name: string, branch: Branch, index: number | null): TemplateResult {
  const cut = index ?? branch.tokens.length;
  const { sum } = totalLogprob(branch.tokens);
  const after = branch.tokens[cut];
  return html`<div class="column">
    <h4>${name} · ${branch.tokens.length} tokens · logprob ${sum.toFixed(2)}</h4>
    <p dir="auto"><span class="dim">${visible(textOf(branch.tokens.slice(0, cut)))}</span><mark>${visible(after?.text ?? "")}</mark>${visible(textOf(branch.tokens.slice(cut + 1)))}</p>
    ${after?.top ? distribution(after) : nothing}
    ${index === null ? nothing : html`<button type="button" @click=${() => app.show(branch, index)}>Why</button>`}
  </div>`;
}

function distribution(token: Token): TemplateResult {
  const top = (token.top ?? []).slice(0, 6);
  if (token.logprob !== undefined && !top.some((one) => one.id === token.id)) top.push({ id: token.id, text: token.text, logprob: token.logprob });
  return html`<ul class="distribution">${top.map((one) => {
    const p = Math.exp(one.logprob);
    return html`<li class=${one.id === token.id ? "chosen" : ""}><span class="token">${label(one.text, 16)}</span><span class="bar" .style=${`--w:${p}`}></span><span>${percent(p)}</span></li>`;
  })}</ul>`;
}
