// The colour of a token, as a number from 0 (none) to 1 (the strongest).

import type { Token } from "./types.js";

export type TintMode = "none" | "probability" | "surprise" | "entropy" | "time";
export const TINTS: { mode: TintMode; name: string; about: string }[] = [
  { mode: "probability", name: "Probability", about: "none from 0.70 up, then pale yellow to red" },
  { mode: "surprise", name: "Surprise", about: "bits: 1 for a coin toss, 12 and more is deepest" },
  { mode: "entropy", name: "Entropy", about: "how undecided the model was, over the full vocabulary" },
  { mode: "time", name: "Time", about: "how much later than the median token it came" },
  { mode: "none", name: "None", about: "" },
];

const SURE = 0.7;
const MOST_SURPRISE = 12;
const MOST_ENTROPY = 8;

export function byProbability(p: number): number {
  return p >= SURE ? 0 : Math.pow(1 - Math.max(0, p) / SURE, 0.75);
}

export function tint(mode: TintMode, token: Token, gap: number | null, median: number): number | null {
  switch (mode) {
    case "none":
      return null;
    case "probability":
      return token.logprob === undefined ? null : byProbability(Math.exp(token.logprob));
    case "surprise":
      return token.logprob === undefined ? null : Math.min(1, -token.logprob / Math.LN2 / MOST_SURPRISE);
    case "entropy":
      return token.trace === undefined ? null : Math.min(1, token.trace.entropy_bits / MOST_ENTROPY);
    case "time":
      if (gap === null || median <= 0) return null;
      return Math.max(0, Math.min(1, Math.log2(gap / median) / 4));
  }
}

export function medianOf(values: number[]): number {
  if (!values.length) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[sorted.length >> 1] ?? 0;
}
