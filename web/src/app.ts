// What the page knows, and what can be done from anywhere in it. Views draw it and call it.

import * as api from "./api.js";
import { Tree, type Asked, type Branch } from "./branches.js";
import type { TintMode } from "./tint.js";
import type { Capabilities, ForkEvent, ForkRequest, Machine, Params, ServedModel, Token } from "./types.js";

export type View = "write" | "branches" | "engine" | "verify" | "learn" | "chat";
export const VIEWS: { view: View; name: string }[] = [
  { view: "write", name: "Write" },
  { view: "branches", name: "What if" },
  { view: "engine", name: "Engine" },
  { view: "verify", name: "Verify" },
  { view: "learn", name: "Learn" },
  { view: "chat", name: "Chat" },
];
export const MORE_TOKENS = 48; // that a branch gets beyond the place where it leaves
const DEFAULTS: Params = { max_tokens: 128, temperature: 0.8, top_p: 0.95 };
const ALTERNATIVES = 8;
const LOOK_MILLISECONDS = 300; // between looks at a model that is being loaded

interface Notice { text: string; kind: "info" | "error"; undo?: () => void }
type TokenListener = (branch: Branch) => void;

export interface RunOptions {
  parent?: Branch;
  at?: number; // how many of the parent's tokens are kept
  more?: Token[]; // tokens chosen by hand that follow them
  text?: string; // text that follows those
  params?: Params; // instead of the parent's
  seed?: number | null;
  quiet?: boolean; // do not show it
}

class App {
  caps: Capabilities | null = null;
  machine: Machine | null = null;
  models: ServedModel[] = []; // of the server; the page shows one of them
  loading: string | null = null; // a model that is being loaded, and how far that is
  view: View = "write";
  isUp = true;
  notice: Notice | null = null;

  readonly tree = new Tree();
  current: Branch | null = null;
  cursor: number | null = null; // the token that is looked at
  asked: Asked = { mode: "completion", prompt: "The capital of France is", messages: [], params: { ...DEFAULTS } };
  system = "";
  tint: TintMode = "probability";
  marks = false;
  record = true; // ask for every step's trace

  private readonly listeners = new Set<TokenListener>();
  private modelListener: () => void = () => undefined;
  private readonly running = new Map<number, AbortController>();
  private draw: () => void = () => undefined;
  private isDrawing = false;

  onDraw(draw: () => void): void {
    this.draw = draw;
  }

  /** Draw the page anew, once, before the next frame. */
  changed(): void {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.draw();
    });
  }

  /** Called when another model is shown. */
  onModel(listener: () => void): void {
    this.modelListener = listener;
  }

  onTokens(listener: TokenListener): void {
    this.listeners.add(listener);
  }

  /** Say something at the bottom of the page; `undo` takes back what it is about. */
  tell(text: string, kind: "info" | "error" = "info", undo?: () => void): void {
    this.notice = { text, kind, ...(undo ? { undo } : {}) };
    this.changed();
    if (kind === "info") {
      const mine = this.notice;
      setTimeout(() => { if (this.notice === mine) { this.notice = null; this.changed(); } }, 6000);
    }
  }

  fail(error: unknown): void {
    if (error instanceof DOMException && error.name === "AbortError") return;
    this.tell(error instanceof Error ? error.message : String(error), "error");
  }

  /** Learn of the server again; `name`: and show this model of it. */
  async load(name: string | undefined = this.caps?.model): Promise<void> {
    this.models = await api.models();
    const here = this.models.find((one) => one.id === name) ?? this.models.find((one) => one.state === "loaded") ?? this.models[0];
    if (here) await this.bring(here.id);
    this.caps = await api.capabilities();
    this.machine = await api.machine().catch(() => null); // an engine in another process tells nothing of itself
    this.isUp = true;
    this.changed();
  }

  /** Show another model. Answers of the one before are forgotten: their tokens mean nothing to it. */
  async useModel(name: string): Promise<boolean> {
    if (name === this.caps?.model) return true;
    const before = this.caps?.model;
    try {
      await this.load(name);
      for (const branch of this.tree.list()) this.tree.remove(branch);
      this.current = null;
      this.cursor = null;
      this.modelListener();
      this.changed();
      return true;
    } catch (error) {
      if (before !== undefined) api.useModel(before);
      this.fail(error);
      return false;
    }
  }

  /** Have a model loaded, and ask it from now on. */
  private async bring(name: string): Promise<void> {
    let isAsked = false;
    try {
      for (;;) {
        const found = this.models.find((one) => one.id === name);
        if (!found) throw new Error(`The server has no model ${name} any more.`);
        if (found.state === "loaded") break;
        if (found.state === "failed" && isAsked) throw new Error(found.error ?? `${name} could not be loaded.`);
        if (found.state !== "loading" && found.state !== "unloading") {
          await api.loadModel(name);
          isAsked = true;
        }
        this.loading = `${name} ${Math.round(100 * (found.progress ?? 0))}%`;
        this.changed();
        await new Promise((go) => setTimeout(go, LOOK_MILLISECONDS));
        this.models = await api.models();
      }
    } finally {
      this.loading = null;
      this.changed();
    }
    api.useModel(name);
  }

  go(view: View): void {
    this.view = view;
    history.replaceState(null, "", `#${view}`);
    this.changed();
    document.querySelector<HTMLElement>("main")?.scrollTo(0, 0);
  }

  select(index: number | null): void {
    this.cursor = index;
    this.changed();
  }

  show(branch: Branch, cursor: number | null = null): void {
    this.current = branch;
    this.cursor = cursor;
    for (const listen of this.listeners) listen(branch);
    this.changed();
  }

  isRunning(branch: Branch | null): boolean {
    return branch !== null && this.running.has(branch.id);
  }

  stop(branch: Branch): void {
    this.running.get(branch.id)?.abort();
  }

  /** The messages or the prompt as the form has them now. */
  currentAsked(): Asked {
    const { mode, prompt, params } = this.asked;
    const system = this.system.trim();
    const messages = mode === "chat"
      ? [...(system ? [{ role: "system" as const, content: system }] : []), { role: "user" as const, content: prompt }]
      : [];
    return { mode, prompt, messages, params: { ...params } };
  }

  /** The fields of /v1/fork for an answer to `asked`. */
  body(asked: Asked, seed: number | null): ForkRequest {
    const what: ForkRequest = asked.mode === "chat" ? { messages: asked.messages } : { prompt: asked.prompt };
    return { ...what, ...asked.params, ...(seed === null ? {} : { seed }) };
  }

  /** Run a request, or go on from a branch. The branch is there at once and grows. */
  run(asked: Asked, options: RunOptions = {}): Branch {
    const { parent, at = 0, more = [], text = "", params } = options;
    const mine: Asked = { ...asked, params: { ...(params ?? asked.params) } };
    const isAnew = params !== undefined || (options.seed !== undefined && options.seed !== parent?.seed);
    const branch = this.tree.add(mine, parent ?? null, at, isAnew);
    branch.tokens.push(...more.map((token) => ({ ...token, given: true })));
    const seed = (branch.seed = options.seed ?? parent?.seed ?? null);
    const body = this.body(mine, seed);
    const output = branch.tokens.map((token) => token.id);
    if (output.length) body.output = output;
    if (text) body.output_text = text;
    if (output.length || text) {
      const length = Number(mine.params["max_tokens"] ?? 0);
      const least = output.length + Math.ceil(text.length) + MORE_TOKENS; // no token of a text is shorter than a character's byte
      if (mine.params["max_tokens"] !== undefined) body["max_tokens"] = Math.max(length, least);
    }
    void this.follow(branch, body);
    if (!options.quiet) this.show(branch);
    return branch;
  }

  /** Several answers at once from the same place: siblings, or the hypotheses of a beam search. */
  runMany(asked: Asked, count: number, options: RunOptions = {}): Branch[] {
    const { parent, at = 0 } = options;
    const mine: Asked = { ...asked, params: { ...(options.params ?? asked.params) } };
    const branches = Array.from({ length: count }, () => this.tree.add(mine, parent ?? null, at, true));
    for (const branch of branches) {
      branch.isBeam = mine.params["beam"] !== undefined;
      branch.seed = null; // each gets its own
    }
    const body: ForkRequest = { ...this.body(mine, options.seed ?? null), n: count };
    const output = parent ? parent.tokens.slice(0, at).map((token) => token.id) : [];
    if (output.length) {
      body.output = output;
      body["max_tokens"] = Math.max(Number(mine.params["max_tokens"] ?? 0), output.length + MORE_TOKENS);
    }
    void this.followAll(branches, body);
    return branches;
  }

  follow(branch: Branch, body: ForkRequest): Promise<void> {
    return this.followAll([branch], body);
  }

  /** Read the stream of an answer into its branches. Never throws: what goes wrong is told on the branch. */
  private async followAll(branches: Branch[], body: ForkRequest): Promise<void> {
    const abort = new AbortController();
    const began = performance.now();
    for (const branch of branches) {
      this.running.set(branch.id, abort);
      branch.began = began;
    }
    const skip = branches.map((branch) => branch.tokens.length); // tokens that the page has already
    const isBeam = body["beam"] !== undefined;
    const full: ForkRequest = { logprobs: ALTERNATIVES, ...body, ...(this.record && !isBeam ? { trace: true } : {}) };
    try {
      for await (const event of api.fork(full, abort.signal)) this.take(branches, skip, event);
      for (const branch of branches) if (branch.state === "running") branch.state = "done";
    } catch (error) {
      const isStop = error instanceof DOMException && error.name === "AbortError";
      for (const branch of branches) {
        if (branch.state !== "running") continue;
        branch.state = isStop ? "stopped" : "failed";
        branch.held = "";
        if (!isStop) branch.error = error instanceof Error ? error.message : String(error);
      }
      if (error instanceof api.LostError) this.watch();
    } finally {
      for (const branch of branches) {
        this.running.delete(branch.id);
        for (const listen of this.listeners) listen(branch);
      }
      this.changed();
    }
  }

  private take(branches: Branch[], skip: number[], event: ForkEvent): void {
    if ("error" in event) throw new api.ApiError(event.error.message, 500, event.error.param ?? null);
    if (event.object === "fork.begin") {
      branches.forEach((branch, index) => {
        branch.prompt = event.prompt;
        branch.params = event.params;
        branch.receipt = event.receipt;
        branch.warnings = event.warnings;
        branch.number = event.number === null ? null : event.number + index;
        branch.model = event.model;
        branch.seed = index === 0 ? event.receipt.seed : null;
      });
      this.changed();
      return;
    }
    if (event.object === "fork.done") {
      for (const branch of branches) {
        branch.report = event.unspool;
        branch.usage = event.usage;
      }
      return;
    }
    const branch = branches[event.index];
    if (!branch) return;
    if (event.object === "fork.end") {
      branch.finish = event.finish_reason;
      branch.stop = event.stop;
      branch.seed = event.seed;
      branch.held = "";
      branch.state = event.finish_reason === "abort" ? "stopped" : "done";
    } else {
      const at = performance.now();
      const numOutput = branch.tokens.length;
      for (const token of event.tokens) {
        const left = skip[event.index] ?? 0;
        if (left > 0) {
          skip[event.index] = left - 1;
          continue;
        }
        // Without a logprob it was not chosen: it came with output_text.
        branch.tokens.push(token.logprob === undefined ? { ...token, at, given: true } : { ...token, at });
      }
      branch.held = event.held ?? "";
      if (branch.tokens.length === numOutput && !event.held) return;
    }
    for (const listen of this.listeners) listen(branch);
    if (branch === this.current) this.changed();
  }

  /** Look for the server until it answers again. */
  private isWatching = false;
  watch(): void {
    if (this.isWatching) return;
    this.isWatching = true;
    this.isUp = false;
    this.changed();
    const look = async (): Promise<void> => {
      if (await api.isAlive()) {
        this.isWatching = false;
        try {
          await this.load();
          this.tell("The server is back.");
        } catch (error) {
          this.fail(error);
        }
        return;
      }
      setTimeout(() => void look(), 1500);
    };
    setTimeout(() => void look(), 500);
  }
}

export const app = new App();
