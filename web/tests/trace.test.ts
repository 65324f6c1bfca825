import { expect, test } from "vitest";
import { bitsOf } from "../src/bits.js";
import { chooseAgain, choices, rows } from "../src/trace.js";
import { trace } from "./examples.js";

test("the choice follows from the numbers alone, in float32, ties to the lower id", () => {
  const told = trace();
  expect(chooseAgain(told)).toMatchObject({ winner: 11, runnerUp: 10 });
  told.candidates = [
    { token: 9, logit: 16777216, gumbel: 1, score: 0 },
    { token: 4, logit: 16777216, gumbel: 0, score: 0 },
  ];
  expect(chooseAgain(told).winner).toBe(4); // 2^24 + 1 is 2^24 in float32
});

test("rows say which stage removed a token and what is left of the others", () => {
  const found = rows(trace());
  expect(found.map((row) => [row.token, row.removedBy])).toEqual([[10, null], [11, null], [12, "top_k"], [13, "top_k"]]);
  expect(found[0]?.final).toBeCloseTo(Math.exp(8.6 - 9.04));
  expect(found[2]?.final).toBeNull();
  expect(found[2]?.after[0]).toBeCloseTo(Math.exp(6 - 9));
  expect(found[1]?.score).toBe(10.5);
});

test("without a stage the final probability is the raw one", () => {
  const found = rows({ ...trace(), stages: [] });
  expect(found.map((row) => row.final)).toEqual([0.5, 0.25, 0.125, 0.0625]);
});

test("entropy is a number of choices, and bits tell numbers apart that look alike", () => {
  expect(choices(3)).toBe(8);
  expect(bitsOf(1)).toBe("3FF0000000000000");
  expect(bitsOf(0.1 + 0.2)).not.toBe(bitsOf(0.3));
  expect(bitsOf(-0)).not.toBe(bitsOf(0));
});
