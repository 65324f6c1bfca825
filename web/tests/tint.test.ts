import { expect, test } from "vitest";
import { byProbability, medianOf, tint } from "../src/tint.js";
import { trace } from "./examples.js";

test("sure tokens have no tint, and less sure ones a deeper one", () => {
  expect([1, 0.9, 0.7].map(byProbability)).toEqual([0, 0, 0]);
  expect(byProbability(0)).toBe(1);
  const falling = [0.69, 0.5, 0.3, 0.1, 0.001].map(byProbability);
  expect([...falling].sort((a, b) => a - b)).toEqual(falling);
});

test("each mode reads its own number, and none where there is none", () => {
  const token = { id: 1, text: "a", logprob: -6 * Math.LN2 };
  expect(tint("surprise", token, null, 0)).toBeCloseTo(0.5);
  expect(tint("entropy", token, null, 0)).toBeNull();
  expect(tint("entropy", { ...token, trace: trace() }, null, 0)).toBeCloseTo(0.25);
  expect(tint("time", token, 40, 10)).toBeCloseTo(0.5);
  expect(tint("time", token, null, 10)).toBeNull();
  expect(tint("none", token, 40, 10)).toBeNull();
  expect(tint("probability", { id: 1, text: "a" }, null, 0)).toBeNull();
  expect(medianOf([3, 1, 2])).toBe(2);
});
