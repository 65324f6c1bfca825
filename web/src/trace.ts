// Reading a trace: which stage removed a token, what is left after each, and the choice made again from the numbers.

import type { Stage, Trace } from "./types.js";

export interface Row {
  token: number;
  text: string;
  raw: number | null; // probability in the model's own distribution
  after: (number | null)[]; // probability after each stage; null: removed
  final: number | null;
  removedBy: string | null;
  noise: number | null;
  score: number | null;
}

/** The choice, made again from the candidates alone: the best float32 sum of logit and noise; of equals the lower id. */
export function chooseAgain(trace: Trace): { winner: number; runnerUp: number | null; scores: Map<number, number> } {
  const scores = new Map<number, number>();
  for (const { token, logit, gumbel } of trace.candidates) scores.set(token, Math.fround(Math.fround(logit) + Math.fround(gumbel)));
  const order = [...scores].sort(([a, x], [b, y]) => y - x || a - b);
  return { winner: order[0]?.[0] ?? -1, runnerUp: order[1]?.[0] ?? null, scores };
}

export function probability(stage: Stage, logit: number | null): number | null {
  return logit === null ? null : Math.exp(logit - stage.log_total);
}

/** The tokens that a trace follows and those that the draw reports, likeliest first. */
export function rows(trace: Trace): Row[] {
  const raw = new Map(trace.alternatives);
  raw.set(trace.token, trace.raw_probability);
  const drawn = new Map(trace.candidates.map((one) => [one.token, one]));
  const last = trace.stages.at(-1);
  const ids = [...new Set([...raw.keys(), ...drawn.keys()])];
  const found = ids.map((token): Row => {
    const effects = trace.stages.map((stage) => stage.tokens.find((effect) => effect.token === token));
    const after = trace.stages.map((stage, index) => {
      const effect = effects[index];
      return effect ? probability(stage, effect.after) : null;
    });
    const removed = effects.findIndex((effect) => effect !== undefined && effect.before !== null && effect.after === null);
    const candidate = drawn.get(token);
    let final: number | null = raw.get(token) ?? null;
    if (last) final = effects.some((effect) => effect) ? after.at(-1) ?? null : candidate ? probability(last, candidate.logit) : null;
    return {
      token,
      text: trace.texts[token] ?? `#${token}`,
      raw: raw.get(token) ?? null,
      after,
      final,
      removedBy: removed < 0 ? null : trace.stages[removed]?.name ?? null,
      noise: candidate?.gumbel ?? null,
      score: candidate?.score ?? null,
    };
  });
  return found.sort((a, b) => (b.raw ?? -1) - (a.raw ?? -1) || (b.score ?? -Infinity) - (a.score ?? -Infinity));
}

/** Entropy as a number of equally likely tokens. */
export const choices = (bits: number): number => Math.pow(2, bits);
