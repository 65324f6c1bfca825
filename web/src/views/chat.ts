// Chat: conversations that stay in this browser.

import { app } from "../app.js";
import { textOf, type Branch } from "../branches.js";
import { visible } from "../display.js";
import { html, live, nothing, repeat, unlessEdited, type TemplateResult } from "../dom.js";
import { asCsv, asMarkdown, download } from "../export.js";
import type { Message, Params } from "../types.js";

interface Turn { role: "user" | "assistant"; content: string; branch?: number; seed?: number | null; error?: string }
interface Conversation { id: string; title: string; system: string; turns: Turn[]; params: Params; changed: number }

const STORE = "unspool.conversations";
const MOST = 200; // conversations that are kept

let conversations: Conversation[] = load();
let open: string | null = conversations[0]?.id ?? null;
let draft = "";
let answering: Branch | null = null;

function load(): Conversation[] {
  try {
    const value: unknown = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    if (!Array.isArray(value)) return [];
    return value.filter((one): one is Conversation => typeof one?.id === "string" && Array.isArray(one.turns) && typeof one.system === "string")
      .map((one) => ({ ...one, params: one.params ?? {}, turns: one.turns.map(({ branch: _, ...turn }) => turn) }));
  } catch {
    return [];
  }
}

function save(): void {
  conversations.sort((a, b) => b.changed - a.changed);
  conversations.splice(MOST);
  try {
    localStorage.setItem(STORE, JSON.stringify(conversations));
  } catch {
    app.tell("The browser has no room left for conversations; export some and delete them.", "error");
  }
}

function start(): Conversation {
  const one: Conversation = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "New conversation", system: "", turns: [], params: { max_tokens: 512, temperature: 0.7, top_p: 0.95 }, changed: Date.now() };
  conversations.unshift(one);
  open = one.id;
  return one;
}

const current = (): Conversation | null => conversations.find((one) => one.id === open) ?? null;

export function chatView(): TemplateResult {
  const caps = app.caps;
  if (caps && !caps.has_template) return html`<section class="panel"><h2>Chat</h2><p>This model has no chat template: it continues texts. Use Write.</p></section>`;
  const here = current() ?? start();
  return html`
    <div class="chat">
      <nav class="panel conversations" aria-label="Conversations">
        <button type="button" class="primary" id="new-chat" @click=${() => { if (here.turns.length) start(); app.changed(); }}>New conversation</button>
        <ul>${repeat(conversations, (one) => one.id, (one) => html`<li class=${one.id === open ? "open" : ""}>
          <button type="button" class="quiet title" aria-current=${one.id === open ? "true" : nothing} @click=${() => { open = one.id; app.changed(); }}>${one.title}</button>
          <button type="button" class="quiet" aria-label="Delete ${one.title}" @click=${() => forget(one)}>×</button></li>`)}</ul>
        <p class="dim">They are kept in this browser and nowhere else.</p>
      </nav>
      <section class="panel talk" aria-label="Conversation">
        ${header(here)}
        <div class="turns" id="turns" tabindex="0" role="log" aria-label="Messages">
          ${here.turns.length ? here.turns.map((turn, index) => turnView(here, turn, index)) : html`<p class="dim hint">Ask something. Each answer can be looked at token by token.</p>`}
        </div>
        <form class="say" @submit=${(event: Event) => { event.preventDefault(); say(); }}>
          <label class="offscreen" for="say">Message</label>
          <textarea id="say" rows="2" placeholder="Message; Enter sends, Shift+Enter makes a line" .value=${live(draft)}
            @input=${(event: Event) => { draft = (event.target as HTMLTextAreaElement).value; }}
            @keydown=${(event: KeyboardEvent) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); say(); } }}></textarea>
          ${answering && app.isRunning(answering)
            ? html`<button type="button" class="primary stop" @click=${() => answering && app.stop(answering)}>Stop</button>`
            : html`<button type="submit" class="primary" id="send">Send</button>`}
        </form>
      </section>
    </div>
  `;
}

function header(here: Conversation): TemplateResult {
  const number = (name: string, text: string): TemplateResult => html`<label>${text} <input id="chat-${name}" type="number" step="any" .value=${unlessEdited(`chat-${name}`, String(here.params[name] ?? ""))}
    @change=${(event: Event) => { const value = (event.target as HTMLInputElement).value; if (value === "") delete here.params[name]; else here.params[name] = Number(value); save(); }} /></label>`;
  return html`<details class="settings"><summary>${here.title} <span class="dim">system prompt, model, export</span></summary>
    <label class="field"><span>System prompt</span><textarea rows="2" id="chat-system" .value=${live(here.system)} @input=${(event: Event) => { here.system = (event.target as HTMLTextAreaElement).value; }} @change=${save}></textarea></label>
    <div class="inline"><label>Model <select id="chat-model" @change=${(event: Event) => { here.params["model"] = (event.target as HTMLSelectElement).value; save(); void app.useModel(String(here.params["model"])); }}>
      ${app.models.map(({ id, state }) => html`<option value=${id} ?selected=${id === modelOf(here)}>${id}${state === "loaded" ? "" : ` (${state})`}</option>`)}</select></label>
      ${number("temperature", "Temperature")} ${number("top_p", "top_p")} ${number("max_tokens", "Length")}</div>
    <div class="inline"><button type="button" id="export-markdown" @click=${() => download(`${slug(here.title)}.md`, asMarkdown(messages(here), here.title), "text/markdown")}>Markdown</button>
      <button type="button" id="export-json" @click=${() => download(`${slug(here.title)}.json`, JSON.stringify(here, null, 2), "application/json")}>JSON</button>
      <button type="button" id="export-csv" ?disabled=${!lastBranch(here)} @click=${() => { const branch = lastBranch(here); if (branch) download(`${slug(here.title)}.csv`, asCsv(branch), "text/csv"); }}>CSV of the last trace</button></div>
  </details>`;
}

function turnView(here: Conversation, turn: Turn, index: number): TemplateResult {
  const branch = turn.branch === undefined ? null : app.tree.get(turn.branch);
  const isRunning = branch !== null && app.isRunning(branch);
  const text = branch ? textOf(branch.tokens) : turn.content;
  const isLast = index === here.turns.length - 1;
  return html`<article class="turn ${turn.role}">
    <h3>${turn.role === "user" ? "You" : "Model"}</h3>
    <p dir="auto">${visible(text)}${isRunning ? html`<span class="caret"></span>` : nothing}</p>
    ${turn.error ? html`<p class="error" role="alert">${turn.error}</p>` : nothing}
    ${turn.role === "assistant" && !isRunning
      ? html`<div class="inline small">
          ${branch ? html`<button type="button" class="quiet" @click=${() => { app.show(branch); app.go("write"); }}>Token by token</button>` : nothing}
          ${isLast ? html`<button type="button" class="quiet regenerate" @click=${() => regenerate(here)}>Regenerate</button>` : nothing}
        </div>`
      : nothing}
  </article>`;
}

const slug = (text: string): string => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";

function lastBranch(here: Conversation): Branch | null {
  const turn = here.turns.findLast((one) => one.branch !== undefined);
  return turn?.branch === undefined ? null : app.tree.get(turn.branch);
}

function messages(here: Conversation): Message[] {
  const system = here.system.trim();
  return [...(system ? [{ role: "system" as const, content: system }] : []), ...here.turns.map(({ role, content }) => ({ role, content }))];
}

function forget(one: Conversation): void {
  conversations = conversations.filter((other) => other !== one);
  if (open === one.id) open = conversations[0]?.id ?? null;
  save();
  if (one.turns.length) app.tell(`“${one.title}” is deleted.`, "info", () => { conversations.push(one); open = one.id; save(); });
  app.changed();
}

/** The model that a conversation is with: the one that was chosen for it, if the server still has it. */
function modelOf(here: Conversation): string | undefined {
  const chosen = here.params["model"];
  return app.models.find((one) => one.id === chosen)?.id ?? app.caps?.model;
}

function say(): void {
  const text = draft.trim();
  if (!text || app.loading !== null || (answering && app.isRunning(answering))) return;
  const here = current() ?? start();
  if (!here.turns.length) here.title = text.length > 48 ? text.slice(0, 47) + "…" : text;
  here.turns.push({ role: "user", content: text });
  draft = "";
  void answer(here);
}

function regenerate(here: Conversation): void {
  if (here.turns.at(-1)?.role === "assistant") here.turns.pop();
  void answer(here);
}

async function answer(here: Conversation): Promise<void> {
  const model = modelOf(here);
  if (model !== undefined && !(await app.useModel(model))) return;
  const { model: _, ...params } = here.params;
  const asked = { mode: "chat" as const, prompt: here.turns.at(-1)?.content ?? "", messages: messages(here), params };
  const branch = (answering = app.run(asked, { quiet: true }));
  const turn: Turn = { role: "assistant", content: "", branch: branch.id };
  here.turns.push(turn);
  here.changed = Date.now();
  save();
  app.changed();
}

app.onTokens((branch) => {
  for (const one of conversations)
    for (const turn of one.turns) {
      if (turn.branch !== branch.id) continue;
      if (app.view === "chat") app.changed();
      if (branch.state === "running") continue;
      turn.content = textOf(branch.tokens);
      turn.seed = branch.seed;
      if (branch.error) turn.error = branch.error;
      save();
    }
});
