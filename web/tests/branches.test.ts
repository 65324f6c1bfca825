import { expect, test } from "vitest";
import { leastLikely, beamTree, firstDifference, gapBefore, keptTokens, segments, textOf, totalLogprob, Tree } from "../src/branches.js";
import { branchOf, tokens } from "./examples.js";

function family(): { tree: Tree; ids: number[] } {
  const tree = new Tree();
  const root = branchOf("abcdef", null, 0, tree);
  const first = branchOf("XY", root, 2, tree);
  const second = branchOf("Z", root, 2, tree);
  const deep = branchOf("!", first, 3, tree);
  return { tree, ids: [root.id, first.id, second.id, deep.id] };
}

test("a branch has its parent's tokens up to where it leaves", () => {
  const { tree, ids } = family();
  expect(ids.map((id) => textOf(tree.get(id)?.tokens ?? []))).toEqual(["abcdef", "abXY", "abZ", "abX!"]);
});

test("Alt and arrows walk the tree", () => {
  const { tree, ids } = family();
  const [root, first, second, deep] = ids.map((id) => tree.get(id));
  if (!root || !first || !second || !deep) throw new Error("a branch is missing");
  expect(tree.step(deep, "left")).toBe(first);
  expect(tree.step(root, "right")).toBe(first);
  expect(tree.step(first, "down")).toBe(second);
  expect(tree.step(second, "up")).toBe(first);
  expect(tree.step(root, "left")).toBeNull();
  expect(tree.family(deep)).toHaveLength(4);
});

test("a branch that leaves where its parent left is its sibling", () => {
  const { tree, ids } = family();
  const first = tree.get(ids[1] ?? 0);
  const twin = branchOf("Q", first, 2, tree);
  expect(twin.parent).toBe(ids[0]);
  expect(textOf(twin.tokens)).toBe("abQ");
});

test("the drawing cuts a branch where others leave, and every branch ends once", () => {
  const { tree, ids } = family();
  const root = tree.get(ids[0] ?? 0);
  if (!root) throw new Error("no root");
  const drawn = segments(tree, root);
  expect([drawn.from, drawn.to]).toEqual([0, 2]);
  expect(drawn.children).toHaveLength(3);
  const leaves: number[] = [];
  const walk = (one: typeof drawn): void => { leaves.push(...one.leaves); one.children.forEach(walk); };
  walk(drawn);
  expect(leaves.sort()).toEqual([...ids].sort());
});

test("a branch takes along what grew from it", () => {
  const { tree, ids } = family();
  const first = tree.get(ids[1] ?? 0);
  if (first) tree.remove(first);
  expect(tree.list().map((one) => one.id)).toEqual([ids[0], ids[2]]);
});

test("an edit keeps the tokens before the first change", () => {
  expect(keptTokens(tokens("hello"), "hello world")).toEqual({ kept: 5, rest: " world" });
  expect(keptTokens(tokens("hello"), "help")).toEqual({ kept: 3, rest: "p" });
  expect(keptTokens(tokens("hello"), "")).toEqual({ kept: 0, rest: "" });
  const snow = [{ id: 1, text: "", bytes: [226] }, { id: 2, text: "☃", bytes: [152, 131] }, { id: 3, text: "!" }];
  expect(keptTokens(snow, "☃?")).toEqual({ kept: 2, rest: "?" });
  expect(keptTokens(snow, "?")).toEqual({ kept: 0, rest: "?" });
  expect(keptTokens([...tokens("a"), { id: 2, text: "", special: "<|end|>" }], "a")).toEqual({ kept: 1, rest: "" });
});

test("differences, sums, times", () => {
  expect(firstDifference(tokens("abc"), tokens("abd"))).toBe(2);
  expect(firstDifference(tokens("abc"), tokens("ab"))).toBe(2);
  expect(firstDifference(tokens("abc"), tokens("abc"))).toBeNull();
  expect(totalLogprob(tokens("abc"))).toEqual({ sum: -1.5, known: 3 });
  const timed = { tokens: [{ id: 1, text: "a", at: 10 }, { id: 2, text: "b", at: 25 }], at: 1, parent: null };
  expect(gapBefore(timed, 1)).toBe(15);
  expect(gapBefore({ ...timed, parent: 3 }, 1)).toBeNull();
});

test("hypotheses of a beam search share their beginnings", () => {
  const root = beamTree([{ tokens: tokens("abc") }, { tokens: tokens("abd") }, { tokens: tokens("ab") }]);
  const b = root.children[0]?.children[0];
  expect(b?.children.map((node) => node.token?.text)).toEqual(["c", "d"]);
  expect(b?.ends).toEqual([2]);
  expect(b?.children[1]?.logprob).toBeCloseTo(-1.5);
});

test("the least likely tokens are those chosen against the odds", () => {
  const told = [["a", 0.9], ["b", 0.01], ["c", 0.3], ["d", 0.5]].map(([text, p], id) => ({ id, text: String(text), logprob: Math.log(Number(p)) }));
  expect(leastLikely([...told, { id: 9, text: "given" }], 2).map((one) => one.index)).toEqual([1, 2]);
});
