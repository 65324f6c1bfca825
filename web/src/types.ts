// The shapes that the server's API answers with, as far as the page reads them.

export interface Effect { token: number; before: number | null; after: number | null }
export interface Stage { name: string; value: unknown; survivors: number; mass: number; log_total: number; tokens: Effect[] }
export interface Candidate { token: number; logit: number; gumbel: number; score: number }
export interface Trace {
  position: number;
  token: number;
  raw_probability: number;
  raw_rank: number;
  entropy_bits: number;
  alternatives: [number, number][];
  stages: Stage[];
  greedy: boolean;
  seed: number;
  candidates: Candidate[];
  texts: Record<string, string>;
}

export interface TopEntry { id: number; text: string; logprob: number }
export interface Token {
  id: number;
  text: string;
  special?: string; // the name of a control token
  bytes?: number[]; // of a token that holds part of a character
  logprob?: number;
  rank?: number;
  top?: TopEntry[];
  trace?: Trace;
  at?: number; // when it arrived, in milliseconds of performance.now()
  given?: boolean; // not chosen by the model: typed, or picked by hand
}

export interface Receipt { model: string; version: string; kernels: string; seed: number; overrides?: string[] }
export type Params = Record<string, unknown>;
export type Effective = Record<string, { value: unknown; origin: string }>;

export interface Begin {
  object: "fork.begin";
  id: string;
  model: string;
  prompt: number[];
  output: number[];
  number: number | null; // null: the engine is a replica, which has numbers of its own
  params: Effective;
  receipt: Receipt;
  warnings: string[];
}
export interface Tokens { object: "fork.tokens"; index: number; text: string; tokens: Token[]; held?: string }
export interface End { object: "fork.end"; index: number; finish_reason: string; stop: string | number | null; seed: number }
export interface Timings {
  queue: number | null;
  prefill: number | null;
  decode: number | null;
  total: number | null;
  first_token: number | null;
  tokens_per_second: number | null;
}
/** How near an answer came to the machine's ceilings. */
export interface Utilization { weight_bytes: number; cache_bytes: number; mbu: number | null; prefill_compute: number | null }
export interface Report {
  timings: Timings | null;
  utilization?: Utilization | null;
  cached_tokens: number;
  receipt: Receipt;
  warnings: string[];
  choices: { index: number; finish_reason: string; seed: number; timings: Timings; details?: Record<string, unknown> }[];
}
export interface Usage { prompt_tokens: number; completion_tokens: number; total_tokens: number }
export interface Done { object: "fork.done"; usage: Usage; unspool: Report }
export type ForkEvent = Begin | Tokens | End | Done | { error: { message: string; param?: string | null; code?: string | null } };

export interface Message { role: "system" | "user" | "assistant"; content: string }
export interface ForkRequest {
  prompt?: string | number[];
  messages?: Message[];
  is_chat?: boolean;
  output?: number[];
  output_text?: string;
  [field: string]: unknown;
}
export interface WhatIf { index: number; token: Token; trace: Trace; cached_tokens: number; unspool: Report }
export interface Replay {
  choices: { index: number; text: string; finish_reason: string; tokens: Token[] }[];
  crowd: number;
  place: number;
  receipt: Receipt;
}

export interface Parameter {
  name: string;
  group: string;
  help: string;
  schema: Record<string, unknown>;
  value: unknown;
  origin: string;
}
export interface ServedModel {
  id: string;
  state: "unloaded" | "loading" | "loaded" | "unloading" | "failed";
  progress?: number; // of a load, 0 to 1
  error?: string;
}
export interface Capabilities {
  version: string;
  model: string;
  models: string[];
  context_length: number;
  vocab_size: number;
  has_template: boolean;
  special_tokens: Record<string, string>;
  end_ids: number[];
  drafters: string[];
  orders: Record<string, string[]>;
  receipt: Receipt;
  parameters: Parameter[];
}

export interface Work { request: number; start: number; tokens: number; samples: number }
export interface Step {
  number: number;
  start: number;
  seconds: number;
  num_bytes: number; // that it had to read
  flops: number; // operations that it had to do
  works: Work[];
  waiting: number;
  blocks_free: number;
}
export interface Steps { now: number; dropped: number; sees_all: boolean; steps: Step[] }
export type BlockUse = "free" | "cached" | "private" | "shared";
export type StateUse = "free" | "held" | "snapshot";
/** How many parts of the cache there are of each use, and all in order, as runs. */
export interface Uses<Use extends string> { counts: Record<Use, number>; map: [Use, number][] }
export interface StateMap extends Uses<StateUse> { num_slots: number; bytes: number; evictions: number }
export interface CacheMap extends Uses<BlockUse> {
  num_blocks: number;
  block_size: number;
  states: StateMap | null; // of recurrent layers, where the model has any
  evictions: number;
  prefix_queries: number;
  prefix_hits: number;
  preemptions: number;
  requests: { number: number; state: string; prompt_tokens: number; tokens: number; computed: number; cached: number; blocks: number[]; states: number[] }[];
}
export interface Machine {
  cores: number;
  threads: number;
  free_memory: number;
  device: string;
  kernels: string;
  bandwidth: { ceiling: number | null; fastest: number | null };
  compute?: { ceiling: number | null };
  weights_bytes: number;
  kv_bytes_per_token: number;
  layers: number;
}
