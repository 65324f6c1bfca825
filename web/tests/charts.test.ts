import { expect, test, vi } from "vitest";

vi.mock("uplot", () => ({ default: class {} }));
const { lanes, latency } = await import("../src/charts.js");

const step = (number: number, start: number, seconds: number, works: [number, number, number, number][]) => ({
  number, start, seconds, num_bytes: 0, flops: 0, waiting: 0, blocks_free: 0,
  works: works.map(([request, at, tokens, samples]) => ({ request, start: at, tokens, samples })),
});

test("latency is told by the engine's clock, and pauses name whose prompt was read", () => {
  const log = [
    step(0, 10, 0.2, [[1, 0, 8, 1]]),
    step(1, 10.2, 0.1, [[1, 8, 1, 1]]),
    step(2, 10.3, 0.1, [[1, 9, 1, 1]]),
    step(3, 10.4, 0.9, [[1, 10, 1, 1], [2, 0, 500, 1]]),
    step(4, 11.3, 0.1, [[1, 11, 1, 1], [2, 500, 1, 1]]),
  ];
  const told = latency(log, 1);
  expect(told.first).toBeCloseTo(0.2);
  expect(told.gaps.map((gap) => +gap.toFixed(3))).toEqual([0.1, 0.1, 0.9, 0.1]);
  expect(told.pauses.map((pause) => pause.request)).toEqual([2]);
  expect(latency(log, 9)).toEqual({ first: null, gaps: [], pauses: [] });
});

test("each request has a lane", () => {
  const found = lanes([step(0, 0, 1, [[2, 0, 4, 1], [1, 5, 1, 1]])], new Set([1]));
  expect(found.map((lane) => [lane.request, lane.isMine, lane.works[0]?.isPrefill])).toEqual([[1, true, false], [2, false, true]]);
});
