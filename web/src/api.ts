// The server's public API. The key, where one is needed, is kept in this module's memory and nowhere else.

import { EventParser } from "./sse.js";
import type { CacheMap, Capabilities, ForkEvent, ForkRequest, Machine, Replay, ServedModel, Steps, WhatIf } from "./types.js";

export class ApiError extends Error {
  constructor(message: string, readonly status: number, readonly param: string | null = null) {
    super(message);
  }
}

/** The connection broke, or the server went away while it answered. */
export class LostError extends Error {}

let key: string | null = null;
let askForKey: () => Promise<string | null> = async () => null;
let asking: Promise<string | null> | null = null;
let onLink: (isUp: boolean) => void = () => undefined;

export function configure(options: { askForKey: () => Promise<string | null>; onLink: (isUp: boolean) => void }): void {
  askForKey = options.askForKey;
  onLink = options.onLink;
}

export const isSignedIn = (): boolean => key !== null;

async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, headers, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    onLink(false);
    throw new LostError("The server does not answer.");
  }
  onLink(true);
  noteReplicas(answer.headers);
  if (answer.status === 401) {
    asking ??= askForKey().finally(() => { asking = null; });
    const given = await asking;
    if (given === null) throw new ApiError("The server needs an API key.", 401);
    key = given;
    return request(path, init);
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

// A server of replicas says which one told of its engine, and which ones there are.
let chosenReplica: string | null = null;
let told: { names: string[]; shown: string | null } = { names: [], shown: null };
export const replicas = (): { names: string[]; shown: string | null } => told;
export function showReplica(name: string): void { chosenReplica = name; }

function noteReplicas(headers: Headers): void {
  const shown = headers.get("x-unspool-replica");
  if (shown === null) return;
  told = { names: (headers.get("x-unspool-replicas") ?? shown).split(","), shown };
  if (chosenReplica !== null && !told.names.includes(chosenReplica)) chosenReplica = null;
}

async function failure(answer: Response): Promise<ApiError> {
  let message = `The server answered ${answer.status}.`;
  let param: string | null = null;
  try {
    const body = (await answer.json()) as { error?: { message?: string; param?: string | null } };
    message = body.error?.message ?? message;
    param = body.error?.param ?? null;
  } catch {
    // Not JSON: the status says it all.
  }
  return new ApiError(message, answer.status, param);
}

async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const answer = await request(path, signal ? { signal } : {});
  return (await answer.json()) as T;
}

const withModel = <T extends object>(body: T): T => (model === null ? body : { model, ...body });

async function post<T>(path: string, body: object, signal?: AbortSignal): Promise<T> {
  const answer = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(withModel(body)),
    ...(signal ? { signal } : {}),
  });
  return (await answer.json()) as T;
}

async function* events(answer: Response): AsyncGenerator<string> {
  if (answer.body === null) throw new LostError("The answer has no body.");
  const reader = answer.body.getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      let piece: ReadableStreamReadResult<Uint8Array>;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error instanceof DOMException && error.name === "AbortError") throw error;
        onLink(false);
        throw new LostError("The connection broke while the answer came.");
      }
      if (piece.done) return;
      yield* parser.push(piece.value);
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

/** The model that is asked for where a request names none. */
let model: string | null = null;
export function useModel(name: string): void { model = name; }

function named(path: string): string {
  const query = new URLSearchParams(path.split("?")[1]);
  if (model !== null) query.set("model", model);
  if (chosenReplica !== null && path.startsWith("/v1/engine")) query.set("replica", chosenReplica);
  return query.size ? `${path.split("?")[0]}?${query}` : path;
}

export const capabilities = (): Promise<Capabilities> => get(named("/v1/capabilities"));
export const machine = (): Promise<Machine> => get(named("/v1/machine"));
export const cache = (signal?: AbortSignal): Promise<CacheMap> => get(named("/v1/engine/cache"), signal);
export const stepsSince = (since: number): Promise<Steps> => get(named(`/v1/engine/steps?since=${since}`));
export const models = async (): Promise<ServedModel[]> => (await get<{ data: ServedModel[] }>("/v1/models")).data;
export const loadModel = (name: string): Promise<unknown> => post("/models/load", { model: name });

export const whatIf = (body: ForkRequest, signal?: AbortSignal): Promise<WhatIf> => post("/v1/whatif", body, signal);
export const replay = (body: ForkRequest): Promise<Replay> => post("/v1/replay", body);

export function tokenize(body: Record<string, unknown>): Promise<{ tokens: number[]; token_strs: string[]; count: number }> {
  return post("/tokenize", { return_token_strs: true, ...body });
}

/** The events of an answer. Throws a LostError when they end before the answer does. */
export async function* fork(body: ForkRequest, signal: AbortSignal): AsyncGenerator<ForkEvent> {
  const answer = await request("/v1/fork", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(withModel({ ...body, stream: true })),
    signal,
  });
  let isWhole = false;
  for await (const data of events(answer)) {
    if (data === "[DONE]") isWhole = true;
    else yield JSON.parse(data) as ForkEvent;
  }
  if (!isWhole) {
    onLink(false);
    throw new LostError("The server went away while it answered.");
  }
}

/** The engine's steps as they come, until the signal. */
export async function* steps(since: number, signal: AbortSignal): AsyncGenerator<Steps> {
  const answer = await request(named(`/v1/engine/steps?follow=1&since=${since}`), { signal });
  for await (const data of events(answer)) yield JSON.parse(data) as Steps;
}

export async function isAlive(): Promise<boolean> {
  try {
    const answer = await fetch("/health", { cache: "no-store" });
    onLink(answer.ok);
    return answer.ok;
  } catch {
    onLink(false);
    return false;
  }
}
