// An answer as tokens. Append only: a token that came is one node more, and nothing else is touched.
//
// Model text enters the page as textContent and never as HTML.

import { gapBefore, type Branch, type Drafted } from "./branches.js";
import { label, labelOf, percent, shown } from "./display.js";
import { make } from "./dom.js";
import { medianOf, tint, type TintMode } from "./tint.js";
import type { Token } from "./types.js";

const BUDGET = 6; // milliseconds of a frame that drawing may take
const MOST_TIP_ROWS = 8;
// A browser lays a whole line box's block out anew for each token that it gets. So a paragraph that goes on and on is cut
// at a blank after so many tokens, or anywhere after twice as many.
const LONG_LINE = 500;

export interface TokenViewOptions {
  tint: TintMode;
  marks: boolean;
  onSelect: (index: number) => void;
}

let nextId = 1;

export class TokenView {
  readonly node: HTMLElement;
  readonly frames: number[] = []; // how long each drawing took, for those who measure
  private readonly id = `tokens-${nextId++}`;
  private readonly held: HTMLElement;
  private readonly caret: HTMLElement;
  private readonly tip: HTMLElement;
  private spans: HTMLElement[] = [];
  private line: HTMLElement | null = null;
  private branch: Branch | null = null;
  private frame = 0;
  private selected = -1;
  private median = 0;
  private gapsSeen: number[] = [];

  constructor(private options: TokenViewOptions, name: string) {
    this.node = make("div", "tokens");
    this.node.setAttribute("role", "listbox");
    this.node.setAttribute("aria-label", name);
    this.node.tabIndex = 0;
    this.node.dir = "auto";
    this.held = make("span", "held");
    this.held.setAttribute("role", "presentation");
    this.held.title = "Held back: it may still become a stop string.";
    this.caret = make("span", "caret");
    this.caret.setAttribute("role", "presentation");
    this.tip = make("div", "tip");
    this.tip.setAttribute("role", "tooltip");
    this.tip.hidden = true;
    document.body.append(this.tip);
    this.node.addEventListener("click", (event) => this.onClick(event));
    this.node.addEventListener("pointerover", (event) => this.onHover(event));
    this.node.addEventListener("pointerleave", () => this.hideTip());
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("blur", () => this.hideTip());
  }

  show(branch: Branch | null): void {
    if (branch === this.branch) return this.update();
    this.branch = branch;
    this.redraw();
  }

  set(options: Partial<TokenViewOptions>): void {
    const before = this.options;
    this.options = { ...before, ...options };
    if (this.options.marks !== before.marks) this.redraw();
    else if (this.options.tint !== before.tint) this.recolour();
  }

  /** Mark what is known now of the drafts. */
  markDrafts(): void {
    const drafted = this.branch?.drafted;
    if (drafted?.size) this.spans.forEach((span, index) => markDraft(span, drafted.get(index)));
  }

  /** Draw the tokens that came, as many as a frame has room for. */
  update(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.drawSome();
    });
  }

  select(index: number | null): void {
    const next = index ?? -1;
    if (next === this.selected) return;
    this.mark(this.selected, false);
    this.selected = next;
    this.mark(next, true);
  }

  /** Scroll so far that a token is at the top. */
  bringUp(index: number): void {
    this.hideTip();
    this.spans[index]?.scrollIntoView({ block: "start" });
  }

  private mark(index: number, isOn: boolean): void {
    const span = this.spans[index];
    if (!span) return;
    span.classList.toggle("selected", isOn);
    span.setAttribute("aria-selected", String(isOn));
    if (isOn) this.node.setAttribute("aria-activedescendant", span.id);
    else this.node.removeAttribute("aria-activedescendant");
  }

  private redraw(): void {
    this.spans = [];
    this.line = null;
    this.gapsSeen = [];
    this.median = 0;
    this.node.replaceChildren();
    this.hideTip();
    this.update();
  }

  private drawSome(): void {
    const branch = this.branch;
    if (!branch) {
      this.node.replaceChildren();
      return;
    }
    const start = performance.now();
    const parent = this.node.parentElement;
    const isAtEnd = parent !== null && parent.scrollHeight - parent.scrollTop - parent.clientHeight < 40;
    while (this.spans.length < branch.tokens.length) {
      this.append(branch, this.spans.length);
      if (this.spans.length % 32 === 0 && performance.now() - start > BUDGET) break;
    }
    this.drawEnd(branch);
    if (isAtEnd && branch.state === "running" && parent) parent.scrollTop = parent.scrollHeight;
    if (this.selected >= 0) this.mark(this.selected, true);
    this.frames.push(performance.now() - start);
    if (this.spans.length < branch.tokens.length) this.update();
  }

  private append(branch: Branch, index: number): void {
    const token = branch.tokens[index];
    if (!token) return;
    if (!this.line) {
      this.line = make("div", "line");
      this.line.setAttribute("role", "presentation");
      this.node.append(this.line);
    }
    const span = make("span", "t");
    span.id = `${this.id}-${index}`;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    const text = shown(token, this.options.marks);
    span.textContent = text;
    if (text.trim() === "") span.setAttribute("aria-label", labelOf(token));
    span.dataset["i"] = String(index);
    if (token.special !== undefined) span.classList.add("special");
    if (token.given) span.classList.add("given");
    if (branch.parent !== null && index === branch.at) span.classList.add("fork");
    const gap = gapBefore(branch, index);
    if (gap !== null && gap > 0) {
      this.gapsSeen.push(gap);
      if (this.gapsSeen.length < 64 || this.gapsSeen.length % 64 === 0) this.median = medianOf(this.gapsSeen);
    }
    this.colour(span, branch, index);
    markDraft(span, branch.drafted?.get(index));
    this.spans.push(span);
    this.line.append(span);
    const length = this.line.childElementCount;
    const isLong = length >= 2 * LONG_LINE || (length >= LONG_LINE && /\s$/.test(token.text));
    if (token.text.endsWith("\n") || isLong) this.line = null;
  }

  private colour(span: HTMLElement, branch: Branch, index: number): void {
    const token = branch.tokens[index];
    if (!token) return;
    const depth = tint(this.options.tint, token, gapBefore(branch, index), this.median);
    span.classList.toggle("tinted", depth !== null && depth > 0);
    if (depth !== null && depth > 0) span.style.setProperty("--h", depth.toFixed(3));
    else span.style.removeProperty("--h");
  }

  private recolour(): void {
    const branch = this.branch;
    if (branch) this.spans.forEach((span, index) => this.colour(span, branch, index));
  }

  private drawEnd(branch: Branch): void {
    this.held.textContent = branch.held;
    const isRunning = branch.state === "running";
    const last = this.line ?? this.node;
    if (branch.held) last.append(this.held);
    else this.held.remove();
    if (isRunning) last.append(this.caret);
    else this.caret.remove();
  }

  private indexOf(event: Event): number | null {
    const span = event.target instanceof HTMLElement ? event.target.closest<HTMLElement>(".t") : null;
    return span?.dataset["i"] === undefined ? null : Number(span.dataset["i"]);
  }

  private onClick(event: Event): void {
    const index = this.indexOf(event);
    if (index !== null && (getSelection()?.isCollapsed ?? true)) this.options.onSelect(index);
  }

  private onHover(event: Event): void {
    const index = this.indexOf(event);
    if (index === null) this.hideTip();
    else this.showTip(index);
  }

  private onKey(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const last = this.spans.length - 1;
    const here = this.selected;
    const goals: Record<string, number> = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last };
    const goal = goals[event.key];
    if (goal !== undefined && last >= 0) {
      event.preventDefault();
      const index = Math.max(0, Math.min(last, goal));
      this.options.onSelect(index);
      this.select(index); // the next key may come before the next frame
      this.spans[index]?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Escape") this.hideTip();
  }

  private showTip(index: number): void {
    const token = this.branch?.tokens[index];
    const span = this.spans[index];
    if (!token || !span) return;
    this.tip.replaceChildren(...tipRows(token, this.branch?.drafted?.get(index)));
    this.tip.hidden = false;
    const place = span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = Math.max(8, Math.min(innerWidth - width - 8, place.left));
    const top = place.bottom + height + 10 > innerHeight ? place.top - height - 6 : place.bottom + 6;
    this.tip.style.setProperty("left", `${left}px`);
    this.tip.style.setProperty("top", `${Math.max(8, top)}px`);
  }

  private hideTip(): void {
    this.tip.hidden = true;
  }
}

function markDraft(span: HTMLElement | undefined, drafted: Drafted | undefined): void {
  span?.classList.toggle("accepted", drafted?.isAccepted === true);
  span?.classList.toggle("rejected", drafted?.isAccepted === false);
}

function draftText(drafted: Drafted): string {
  if (drafted.isAccepted) return "drafted, and accepted";
  return `${drafted.rejected} drafted ${drafted.rejected === 1 ? "token was" : "tokens were"} rejected here`;
}

function tipRows(token: Token, drafted: Drafted | undefined): HTMLElement[] {
  const head = make("div", "tip-head");
  head.append(make("b", "token", labelOf(token)));
  if (token.logprob !== undefined) head.append(make("span", "", `${percent(Math.exp(token.logprob))} · rank ${token.rank ?? "?"}`));
  else head.append(make("span", "", "given, not chosen"));
  const rows = (token.top ?? []).slice(0, MOST_TIP_ROWS).map((entry) => {
    const row = make("div", entry.id === token.id ? "tip-row chosen" : "tip-row");
    const bar = make("span", "bar");
    bar.style.setProperty("--w", String(Math.exp(entry.logprob)));
    row.append(make("span", "token", label(entry.text)), bar, make("span", "number", percent(Math.exp(entry.logprob))));
    return row;
  });
  const foot = token.trace ? [make("div", "tip-foot", `entropy ${token.trace.entropy_bits.toFixed(2)} bits`)] : [];
  if (drafted) foot.push(make("div", "tip-foot", draftText(drafted)));
  return [head, ...rows, ...foot];
}

