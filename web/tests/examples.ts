// Small values that tests share.

import { Tree, type Asked, type Branch } from "../src/branches.js";
import type { Token, Trace } from "../src/types.js";

export const ASKED: Asked = { mode: "completion", prompt: "It's", messages: [], params: { max_tokens: 8, temperature: 0.8 } };

export function tokens(text: string): Token[] {
  return [...text].map((letter) => ({ id: letter.codePointAt(0) ?? 0, text: letter, logprob: -0.5 }));
}

export function branchOf(text: string, parent: Branch | null = null, at = 0, tree = new Tree()): Branch {
  const branch = tree.add(ASKED, parent, at);
  branch.tokens = [...(parent?.tokens.slice(0, at) ?? []), ...tokens(text)];
  branch.state = "done";
  branch.finish = "length";
  branch.seed = 7;
  return branch;
}

export function trace(): Trace {
  return {
    position: 5,
    token: 11,
    raw_probability: 0.25,
    raw_rank: 2,
    entropy_bits: 2,
    alternatives: [[10, 0.5], [11, 0.25], [12, 0.125], [13, 0.0625]],
    stages: [
      { name: "temperature", value: 0.5, survivors: 100, mass: 1, log_total: 9, tokens: [
        { token: 11, before: 4, after: 8 }, { token: 10, before: 4.3, after: 8.6 }, { token: 12, before: 3, after: 6 }, { token: 13, before: 2, after: 4 }] },
      { name: "top_k", value: 2, survivors: 2, mass: 0.9, log_total: 9.04, tokens: [
        { token: 11, before: 8, after: 8 }, { token: 10, before: 8.6, after: 8.6 }, { token: 12, before: 6, after: null }, { token: 13, before: 4, after: null }] },
    ],
    greedy: false,
    seed: 7,
    candidates: [
      { token: 11, logit: 8, gumbel: 2.5, score: 10.5 },
      { token: 10, logit: 8.6, gumbel: -0.25, score: 8.35 },
    ],
    texts: { "10": " the", "11": " a", "12": " an", "13": " one" },
  };
}
