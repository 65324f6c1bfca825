// The page: its frame, its views, its keys.

import "uplot/dist/uPlot.min.css";
import "./style.css";
import * as api from "./api.js";
import { app, VIEWS, type View } from "./app.js";
import { html, nothing, render, type TemplateResult } from "./dom.js";
import { decodeLink } from "./export.js";
import { branchesView, walk } from "./views/branches.js";
import { chatView } from "./views/chat.js";
import { follow } from "./step-log.js";
import { engineView, refreshMachine, showAnew } from "./views/engine.js";
import { learnView } from "./views/learn.js";
import { open as openLink, opened, verifyView } from "./views/verify.js";
import { answerView, writeView } from "./views/write.js";

const root = document.getElementById("app") as HTMLElement;
const SHOWN: Record<View, () => TemplateResult> = {
  write: writeView, branches: branchesView, engine: engineView, verify: verifyView, learn: learnView, chat: chatView,
};
let problem: string | null = null;

// The key is asked for once and lives in memory alone.
let giveKey: ((key: string | null) => void) | null = null;
let wasRefused = false;
api.configure({
  askForKey: () => new Promise((resolve) => {
    giveKey = (key) => { giveKey = null; wasRefused = true; resolve(key); app.changed(); };
    app.changed();
  }),
  onLink: (isUp) => { if (app.isUp !== isUp) { app.isUp = isUp; app.changed(); } },
});

function signIn(): TemplateResult {
  return html`<div class="veil"><form class="panel signin" role="dialog" aria-modal="true" aria-labelledby="signin-title" @submit=${(event: Event) => {
      event.preventDefault();
      const field = (event.target as HTMLFormElement).elements.namedItem("key") as HTMLInputElement;
      giveKey?.(field.value.trim());
      field.value = "";
    }}>
    <h2 id="signin-title">Sign in</h2>
    <p>This server needs an API key. It stays in this page's memory and is gone when you close or reload it.</p>
    ${wasRefused ? html`<p class="error" role="alert">That key was not taken.</p>` : nothing}
    <label class="field"><span>API key</span><input name="key" type="password" autocomplete="off" required /></label>
    <div class="actions"><button type="submit" class="primary">Sign in</button></div>
  </form></div>`;
}

const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];
let theme: Theme = "auto";

function setTheme(next: Theme): void {
  theme = next;
  document.documentElement.dataset["theme"] = next;
  try {
    localStorage.setItem("unspool.theme", next);
  } catch {
    // A browser that keeps nothing keeps no theme either.
  }
  app.changed();
}

/** The model that is shown, and the others of the server. */
function modelChoice(): TemplateResult {
  const title = `context of ${app.caps?.context_length ?? "?"} tokens`;
  if (app.loading !== null) return html`<span class="model" role="status">loading ${app.loading}</span>`;
  if (app.models.length < 2) return html`<span class="model" title=${title}>${app.caps?.model ?? ""}</span>`;
  return html`<label class="model"><span class="offscreen">Model</span><select id="model" title=${title} @change=${(event: Event) => void app.useModel((event.target as HTMLSelectElement).value)}>
    ${app.models.map(({ id, state }) => html`<option value=${id} ?selected=${id === app.caps?.model}>${id}${state === "loaded" ? "" : ` (${state})`}</option>`)}</select></label>`;
}

function page(): TemplateResult {
  const undo = app.notice?.undo;
  return html`
    <a class="skip" href="#main" @click=${(event: Event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>To the content</a>
    <header class="top">
      <a class="brand" href="#write" @click=${(event: Event) => { event.preventDefault(); app.go("write"); }}><img src="/assets/icon.svg" alt="" width="22" height="22" />unspool</a>
      <nav aria-label="Views"><ul>${VIEWS.map(({ view, name }) => html`<li><a href="#${view}" aria-current=${app.view === view ? "page" : nothing}
        @click=${(event: Event) => { event.preventDefault(); app.go(view); }}>${name}</a></li>`)}</ul></nav>
      <div class="right">
        ${modelChoice()}
        <span class="link ${app.isUp ? "up" : "down"}" role="status"><span>${app.isUp ? "connected" : "no server"}</span></span>
        <button type="button" class="quiet" aria-label="Theme: ${theme}" title="Theme: ${theme}" @click=${() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "auto")}>${{ auto: "◐", light: "☀", dark: "☾" }[theme]}</button>
        ${api.isSignedIn() ? html`<button type="button" class="quiet" id="sign-out" title="Forget the key and all answers" @click=${() => location.reload()}>Sign out</button>` : nothing}
        <a class="quiet" href="/docs" target="_blank" rel="noreferrer">API</a>
      </div>
    </header>
    ${app.notice ? html`<div class="notice ${app.notice.kind}" role=${app.notice.kind === "error" ? "alert" : "status"}><span>${app.notice.text}</span>
      ${undo ? html`<button type="button" id="undo" @click=${() => { app.notice = null; undo(); app.changed(); }}>Undo</button>` : nothing}
      <button type="button" class="quiet" aria-label="Dismiss" @click=${() => { app.notice = null; app.changed(); }}>×</button></div>` : nothing}
    <main id="main" tabindex="-1" class="view-${app.view}">
      <h1 class="offscreen">unspool inspector: ${VIEWS.find((one) => one.view === app.view)?.name}</h1>
      ${app.caps ? SHOWN[app.view]() : html`<p class="loading">${problem ?? `Loading ${app.loading ?? "…"}`}</p>`}
    </main>
    ${giveKey ? signIn() : nothing}
  `;
}

root.replaceChildren(); // what stood there while the page was loaded
app.onDraw(() => {
  render(page(), root);
  answerView.select(app.view === "write" ? app.cursor : null);
  if (giveKey && !(document.activeElement instanceof HTMLInputElement && document.activeElement.name === "key")) document.querySelector<HTMLInputElement>("input[name=key]")?.focus();
});

addEventListener("keydown", (event) => {
  if (giveKey) return;
  if (walk(event)) event.preventDefault();
  else if (event.key === "Escape" && app.cursor !== null && !(event.target instanceof HTMLTextAreaElement)) app.select(null);
});
addEventListener("resize", () => app.changed());
addEventListener("hashchange", route);

function route(): void {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name.startsWith("r=")) {
    const link = decodeLink(name.slice(2));
    if (link) openLink(link);
    else app.tell("The link is broken: it does not hold a request.", "error");
    app.view = link ? "verify" : "write";
  } else if (VIEWS.some(({ view }) => view === name)) app.view = name as View;
  app.changed();
}

async function begin(): Promise<void> {
  try {
    await app.load();
    if (opened) openLink(opened);
    problem = null;
    void refreshMachine();
    const prompt = new URLSearchParams(location.search).get("prompt");
    if (prompt !== null) app.asked = { ...app.asked, prompt };
  } catch (error) {
    problem = error instanceof Error ? error.message : String(error);
    if (error instanceof api.LostError) app.watch();
    app.changed();
  }
  follow();
}

try {
  setTheme((THEMES.find((one) => one === localStorage.getItem("unspool.theme")) ?? "auto"));
} catch {
  setTheme("auto");
}
// For tests and for the curious: what the page shows, as data.
Object.assign(globalThis, { unspool: { app, frames: () => answerView.frames } });
app.onModel(showAnew);
route();
void begin();
