// Answers as branches of trees: a branch shares the first tokens of its parent and goes on by itself.

import type { Effective, Message, Params, Receipt, Report, Token, Usage } from "./types.js";

export interface Asked {
  mode: "completion" | "chat";
  prompt: string;
  messages: Message[];
  params: Params; // what the user set; all else is the model's or the default
}

/** What speculation did at a token: guessed it, or guessed so many others from there on that were wrong. */
export interface Drafted { isAccepted: boolean; rejected: number }

export type BranchState = "running" | "done" | "stopped" | "failed";

export interface Branch {
  id: number;
  parent: number | null;
  at: number; // how many of its first tokens are the parent's
  begun: number; // how many of its first tokens must be given to get it again
  isBeam: boolean; // a hypothesis of a beam search, which is no branch of the tree
  asked: Asked;
  tokens: Token[];
  state: BranchState;
  error: string | null;
  held: string; // text that may still become a stop string
  finish: string | null;
  stop: string | number | null;
  seed: number | null;
  prompt: number[]; // token ids
  params: Effective;
  receipt: Receipt | null;
  model: string | null; // the name by which the server has it
  report: Report | null;
  usage: Usage | null;
  warnings: string[];
  number: number | null; // of its request in the engine
  began: number; // milliseconds of performance.now()
  score: number | null; // of a beam search
  drafted: Map<number, Drafted> | null; // by the index of a token
}

export class Tree {
  private readonly all = new Map<number, Branch>();
  private next = 1;

  /** A branch that shares the first tokens of another. `isAnew`: from there on with another seed or other parameters. */
  add(asked: Asked, from: Branch | null = null, at = 0, isAnew = false): Branch {
    const begun = from ? (isAnew ? at : Math.min(at, from.begun)) : 0;
    // One that leaves where its parent does, or before, is a branch of what that one grew from.
    let parent = from;
    while (parent && parent.parent !== null && at <= parent.at) parent = this.get(parent.parent);
    const branch: Branch = {
      id: this.next++,
      parent: parent?.id ?? null,
      at,
      begun,
      isBeam: false,
      asked,
      tokens: from ? from.tokens.slice(0, at) : [],
      state: "running",
      error: null,
      held: "",
      finish: null,
      stop: null,
      seed: from?.seed ?? null,
      prompt: from?.prompt ?? [],
      params: from?.params ?? {},
      receipt: from?.receipt ?? null,
      model: from?.model ?? null,
      report: null,
      usage: null,
      warnings: [],
      number: null,
      began: 0,
      score: null,
      drafted: null,
    };
    this.all.set(branch.id, branch);
    return branch;
  }

  get(id: number | null): Branch | null {
    return id === null ? null : this.all.get(id) ?? null;
  }

  list(): Branch[] {
    return [...this.all.values()];
  }

  roots(): Branch[] {
    return this.list().filter((branch) => !branch.isBeam && this.get(branch.parent) === null);
  }

  children(branch: Branch): Branch[] {
    return this.list().filter((one) => one.parent === branch.id);
  }

  rootOf(branch: Branch): Branch {
    let here = branch;
    for (let up = this.get(here.parent); up; up = this.get(here.parent)) here = up;
    return here;
  }

  /** A branch and all that grew from it are forgotten. */
  remove(branch: Branch): void {
    for (const child of this.children(branch)) this.remove(child);
    this.all.delete(branch.id);
  }

  /** All branches that share a root, the root first. */
  family(branch: Branch): Branch[] {
    const found: Branch[] = [];
    const walk = (one: Branch): void => {
      found.push(one);
      for (const child of this.children(one)) walk(child);
    };
    walk(this.rootOf(branch));
    return found;
  }

  /** The branch by whose seed and parameters a token was chosen: an ancestor's, before the place where a branch leaves. */
  ownerOf(branch: Branch, index: number): Branch {
    let here = branch;
    for (let up = this.get(here.parent); up && index < here.at; up = this.get(here.parent)) here = up;
    return here;
  }

  /** Where Alt and an arrow lead: to the parent, the first child, the branch before or after among its like. */
  step(branch: Branch, direction: "left" | "right" | "up" | "down"): Branch | null {
    if (direction === "left") return this.get(branch.parent);
    if (direction === "right") return this.children(branch)[0] ?? null;
    const parent = this.get(branch.parent);
    const level = parent ? this.children(parent) : this.roots();
    const place = level.findIndex((one) => one.id === branch.id);
    return level[place + (direction === "up" ? -1 : 1)] ?? null;
  }
}

export function textOf(tokens: readonly Token[]): string {
  return tokens.map((token) => token.text).join("");
}

/** The first index at which two answers differ; null where one is the beginning of the other and both are equally long. */
export function firstDifference(a: readonly Token[], b: readonly Token[]): number | null {
  const shared = Math.min(a.length, b.length);
  for (let index = 0; index < shared; index++) if (a[index]?.id !== b[index]?.id) return index;
  return a.length === b.length ? null : shared;
}

export function totalLogprob(tokens: readonly Token[]): { sum: number; known: number } {
  let sum = 0;
  let known = 0;
  for (const token of tokens) {
    if (token.logprob === undefined) continue;
    sum += token.logprob;
    known += 1;
  }
  return { sum, known };
}

/** The tokens that the model chose against its own odds, the least likely first. Those above an even chance are none. */
export function leastLikely(tokens: readonly Token[], most: number): { index: number; p: number }[] {
  const found = tokens.flatMap((token, index) => (token.logprob === undefined || token.logprob > -Math.LN2 ? [] : [{ index, p: Math.exp(token.logprob) }]));
  return found.sort((a, b) => a.p - b.p).slice(0, most);
}

/** Milliseconds between a token and the one before it; null for the first, and where a branch leaves its parent. */
export function gapBefore(branch: Pick<Branch, "tokens" | "at" | "parent">, index: number): number | null {
  const here = branch.tokens[index]?.at;
  const before = branch.tokens[index - 1]?.at;
  const isSeam = branch.parent !== null && (index === branch.at || branch.tokens[index - 1]?.given === true);
  return here === undefined || before === undefined || isSeam ? null : here - before;
}

/** Which tokens stay when a text is edited: those that lie wholly before the first change, and the text that follows. */
export function keptTokens(tokens: readonly Token[], edited: string): { kept: number; rest: string } {
  let offset = 0;
  let kept = 0;
  let pending = 0; // tokens of a character that is not whole yet
  for (const token of tokens) {
    if (token.special !== undefined) break;
    pending += 1;
    if (token.text === "") continue;
    if (!edited.startsWith(token.text, offset)) break;
    offset += token.text.length;
    kept += pending;
    pending = 0;
  }
  return { kept, rest: edited.slice(offset) };
}

// The tree as it is drawn: branches cut into segments at every place where another one leaves.
export interface Segment {
  branch: number; // the branch whose tokens these are
  from: number;
  to: number;
  children: Segment[];
  leaves: number[]; // the branch that ends here
}

export function segments(tree: Tree, root: Branch): Segment {
  const build = (branch: Branch, from: number): Segment => {
    // Branches that leave before this part began belong to parts before it.
    const leaving = tree.children(branch).filter((child) => child.at >= from).sort((a, b) => a.at - b.at || a.id - b.id);
    return cut(branch, from, leaving);
  };
  const cut = (branch: Branch, from: number, leaving: Branch[]): Segment => {
    const first = leaving[0];
    if (!first) return { branch: branch.id, from, to: branch.tokens.length, children: [], leaves: [branch.id] };
    const here = leaving.filter((child) => child.at === first.at);
    const later = leaving.filter((child) => child.at !== first.at);
    const rest = cut(branch, first.at, later);
    return { branch: branch.id, from, to: first.at, children: [rest, ...here.map((child) => build(child, child.at))], leaves: [] };
  };
  return build(root, 0);
}

// Hypotheses of a beam search as a tree of shared beginnings.
export interface BeamNode { token: Token | null; logprob: number; children: BeamNode[]; ends: number[] }

export function beamTree(answers: readonly { tokens: readonly Token[] }[]): BeamNode {
  const root: BeamNode = { token: null, logprob: 0, children: [], ends: [] };
  answers.forEach((answer, number) => {
    let node = root;
    for (const token of answer.tokens) {
      let next = node.children.find((child) => child.token?.id === token.id);
      if (!next) {
        next = { token, logprob: node.logprob + (token.logprob ?? 0), children: [], ends: [] };
        node.children.push(next);
      }
      node = next;
    }
    node.ends.push(number);
  });
  return root;
}
