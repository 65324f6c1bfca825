// An answer in other forms: links, commands, tables, timelines.

import { textOf, type Asked, type Branch } from "./branches.js";
import type { Params, Receipt, Step } from "./types.js";

/** The request with every parameter that matters and the seed in force: what gives the same answer anywhere. */
export function exactRequest(branch: Branch): { path: string; body: Params } {
  const asked = branch.asked;
  const params: Params = { ...asked.params, seed: branch.seed };
  if (asked.mode === "chat") return { path: "/v1/chat/completions", body: { messages: asked.messages, ...renamed(params) } };
  return { path: "/v1/completions", body: { prompt: asked.prompt, ...params } };
}

function renamed(params: Params): Params {
  const { max_tokens: length, logprobs, ...rest } = params;
  const body: Params = { ...rest };
  if (length !== undefined) body["max_completion_tokens"] = length;
  if (logprobs !== undefined) Object.assign(body, { logprobs: true, top_logprobs: logprobs });
  return body;
}

/** How many of a branch's first tokens are given to get it again: those chosen by hand, and those of another run. */
export const numGiven = (branch: Pick<Branch, "tokens" | "begun">): number => Math.max(branch.begun, lastGiven(branch) + 1);

/** The limit that gives the whole of an answer and no more. */
function lengthOf(branch: Branch): number {
  const asked = Number(branch.asked.params["max_tokens"] ?? 0);
  const isCut = branch.finish === "length" || branch.state === "stopped" || branch.state === "failed";
  return isCut ? branch.tokens.length : Math.max(asked, branch.tokens.length);
}

/** The request for /v1/fork that gives a branch again. */
export function forkBody(branch: Branch): Params {
  const given = numGiven(branch);
  const asked = branch.asked;
  const body: Params = asked.mode === "chat" ? { messages: asked.messages } : { prompt: asked.prompt };
  Object.assign(body, asked.params, { seed: branch.seed, max_tokens: lengthOf(branch) });
  if (given > 0) body["output"] = branch.tokens.slice(0, given).map((token) => token.id);
  return body;
}

function lastGiven(branch: Pick<Branch, "tokens">): number {
  for (let index = branch.tokens.length - 1; index >= 0; index--) if (branch.tokens[index]?.given) return index;
  return -1;
}

function quote(text: string): string {
  return `'${text.replace(/'/g, `'\\''`)}'`;
}

/** A command or a program knows no key: both take it from this variable of their environment. */
const KEY = "UNSPOOL_API_KEY";

function requestOf(branch: Branch): { path: string; body: Params } {
  const { path, body } = numGiven(branch) > 0 ? { path: "/v1/fork", body: forkBody(branch) } : exactRequest(branch);
  return { path, body: branch.model === null ? body : { model: branch.model, ...body } };
}

export function asCurl(branch: Branch, origin: string, needsKey = false): string {
  const { path, body } = requestOf(branch);
  const key = needsKey ? ` -H "authorization: Bearer $${KEY}"` : "";
  return `curl ${origin}${path} -H 'content-type: application/json'${key} \\\n  -d ${quote(JSON.stringify(body))}`;
}

export function asPython(branch: Branch, origin: string, needsKey = false): string {
  const { path, body } = requestOf(branch);
  const key = needsKey ? `, "authorization": "Bearer " + os.environ["${KEY}"]` : "";
  return [
    "import json",
    ...(needsKey ? ["import os"] : []),
    "from urllib.request import Request, urlopen",
    "",
    `body = json.loads(${pythonString(JSON.stringify(body))})`,
    `request = Request(${pythonString(origin + path)}, json.dumps(body).encode(), {"content-type": "application/json"${key}})`,
    "answer = json.load(urlopen(request))",
    `print(answer["choices"][0]${path === "/v1/chat/completions" ? '["message"]["content"]' : '["text"]'})`,
  ].join("\n");
}

export function pythonString(text: string): string {
  // JSON's escapes are Python's too, but for characters beyond U+FFFF, which JSON.stringify leaves as they are.
  return JSON.stringify(text);
}

// Permalinks ---------------------------------------------------------------------------------------------------------
export interface Link { v: 1; asked: Asked; seed: number | null; output: number[]; ids: number[]; receipt: Receipt | null; model: string | null }
const MOST_LINK_IDS = 2048;

export function linkOf(branch: Branch): Link {
  const given = numGiven(branch);
  const ids = branch.tokens.map((token) => token.id);
  return {
    v: 1,
    asked: branch.asked,
    seed: branch.seed,
    output: ids.slice(0, given),
    ids: ids.length <= MOST_LINK_IDS ? ids : [],
    receipt: branch.receipt,
    model: branch.model,
  };
}

export function encodeLink(link: Link): string {
  const data = new TextEncoder().encode(JSON.stringify(link));
  let text = "";
  for (const byte of data) text += String.fromCharCode(byte);
  return btoa(text).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

/** The link that a fragment holds; null for one that is broken, or of a version that is not known. */
export function decodeLink(fragment: string): Link | null {
  try {
    const text = atob(fragment.replace(/-/g, "+").replace(/_/g, "/"));
    const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
    const value = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes)) as Partial<Link>;
    const asked = value.asked;
    if (value.v !== 1 || !asked || (asked.mode !== "chat" && asked.mode !== "completion")) return null;
    if (typeof asked.prompt !== "string" || !Array.isArray(asked.messages) || typeof asked.params !== "object") return null;
    const isMessage = (one: unknown): boolean =>
      typeof one === "object" && one !== null && typeof (one as { content?: unknown }).content === "string";
    if (!asked.messages.every(isMessage)) return null;
    return {
      v: 1,
      asked: { mode: asked.mode, prompt: asked.prompt, messages: asked.messages, params: asked.params ?? {} },
      seed: typeof value.seed === "number" ? value.seed : null,
      output: numbers(value.output),
      ids: numbers(value.ids),
      receipt: value.receipt ?? null,
      model: typeof value.model === "string" ? value.model : null,
    };
  } catch {
    return null;
  }
}

function numbers(value: unknown): number[] {
  return Array.isArray(value) ? value.filter((one): one is number => Number.isInteger(one)) : [];
}

export function receiptDifferences(ours: Receipt, theirs: Receipt): string[] {
  const names = { model: "weights", version: "version", kernels: "kernels", overrides: "overrides" } as const;
  return (Object.keys(names) as (keyof typeof names)[]).flatMap((field) => {
    const [here, then] = [ours, theirs].map((receipt) => String(receipt[field] ?? "none"));
    return here === then ? [] : [`${names[field]}: ${short(then ?? "")} then, ${short(here ?? "")} here`];
  });
}

const short = (text: string): string => (text.length > 16 ? text.slice(0, 12) + "…" : text);

// Tables -------------------------------------------------------------------------------------------------------------
function cell(value: unknown): string {
  if (value === null || value === undefined) return "";
  let text = String(value);
  if (/^[=+\-@\t\r]/.test(text) && typeof value === "string") text = `'${text}`; // a spreadsheet would run it
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

export function asCsv(branch: Branch): string {
  const head = ["index", "id", "text", "logprob", "probability", "rank", "entropy_bits", "given", "survivors", "noise", "score", "runner_up"];
  const lines = branch.tokens.map((token, index) => {
    const trace = token.trace;
    const best = trace?.candidates[0];
    const second = trace?.candidates[1];
    return [
      index,
      token.id,
      token.special ?? token.text,
      token.logprob,
      token.logprob === undefined ? null : Math.exp(token.logprob),
      token.rank,
      trace?.entropy_bits,
      token.given ? "yes" : "",
      trace?.stages.map((stage) => `${stage.name} ${stage.survivors}`).join("; "),
      best?.gumbel,
      best?.score,
      second ? trace?.texts[second.token] : null,
    ].map(cell).join(",");
  });
  return [head.join(","), ...lines].join("\r\n") + "\r\n";
}

export function asJson(branch: Branch): string {
  const { asked, seed, params, receipt, finish, stop, prompt, tokens, usage, report } = branch;
  return JSON.stringify({ asked, seed, params, receipt, finish, stop, prompt, text: textOf(tokens), tokens, usage, report }, null, 2);
}

export function asMarkdown(messages: readonly { role: string; content: string }[], title: string): string {
  const parts = messages.map((message) => `## ${message.role}\n\n${message.content}\n`);
  return `# ${title}\n\n${parts.join("\n")}`;
}

// Perfetto -----------------------------------------------------------------------------------------------------------
/** Chrome's trace format, which ui.perfetto.dev opens: one track for steps, one for each request. */
export function asPerfetto(steps: readonly Step[]): string {
  const events: Record<string, unknown>[] = [
    { ph: "M", pid: 1, name: "process_name", args: { name: "unspool" } },
    { ph: "M", pid: 1, tid: 0, name: "thread_name", args: { name: "steps" } },
  ];
  const seen = new Set<number>();
  for (const step of steps) {
    const ts = step.start * 1e6;
    const dur = step.seconds * 1e6;
    const tokens = step.works.reduce((sum, work) => sum + work.tokens, 0);
    events.push({ ph: "X", pid: 1, tid: 0, ts, dur, name: `step ${step.number}`, args: { tokens, waiting: step.waiting, bytes: step.num_bytes } });
    events.push({ ph: "C", pid: 1, ts, name: "free blocks", args: { blocks: step.blocks_free } });
    for (const work of step.works) {
      const tid = work.request + 1;
      if (!seen.has(tid)) {
        seen.add(tid);
        events.push({ ph: "M", pid: 1, tid, name: "thread_name", args: { name: `request ${work.request}` } });
      }
      events.push({ ph: "X", pid: 1, tid, ts, dur, name: isPrefill(work) ? "prefill" : "decode", args: { start: work.start, tokens: work.tokens } });
    }
  }
  return JSON.stringify({ traceEvents: events, displayTimeUnit: "ms" });
}

/** Whether a piece of work reads a prompt: it computes tokens of which at most the last one chooses. */
export function isPrefill(work: { start: number; tokens: number; samples: number }): boolean {
  return work.start === 0 || work.samples === 0 || work.tokens > work.samples;
}

export function download(name: string, text: string, type: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
