import { expect, test, vi } from "vitest";
import { branchOf } from "./examples.js";

vi.mock("../src/app.js", () => ({ app: { onTokens: () => undefined } }));
const { draftedOf } = await import("../src/step-log.js");

const step = (number: number, works: [number, number, number, number][]) => ({
  number, start: number, seconds: 1, num_bytes: 0, flops: 0, waiting: 0, blocks_free: 0,
  works: works.map(([request, start, tokens, samples]) => ({ request, start, tokens, samples })),
});

test("drafts are told by what the next step begins with", () => {
  const branch = branchOf("abcdefg");
  branch.prompt = [1, 2, 3];
  branch.number = 4;
  const steps = [
    step(0, [[4, 0, 3, 1]]), // the prompt; a is chosen
    step(1, [[4, 3, 4, 4], [9, 7, 4, 4]]), // three drafted: b and c are right, the third is not and d is chosen
    step(2, [[4, 6, 3, 3]]), // two drafted: both are right, and g is chosen
  ];
  const found = draftedOf(branch, steps);
  expect([...found].filter(([, one]) => one.isAccepted).map(([index]) => index)).toEqual([1, 2, 4, 5]);
  expect([...found].filter(([, one]) => !one.isAccepted)).toEqual([[3, { isAccepted: false, rejected: 1 }]]);
  branch.state = "running";
  expect(draftedOf(branch, steps).has(4)).toBe(false); // what the last step gave is not known yet
  branch.number = null;
  expect(draftedOf(branch, steps).size).toBe(0);
});
