import { expect, test } from "vitest";
import { asCsv, asCurl, asMarkdown, asPerfetto, asPython, decodeLink, encodeLink, exactRequest, forkBody, isPrefill, linkOf, pythonString, receiptDifferences } from "../src/export.js";
import { branchOf, tokens, trace } from "./examples.js";

test("a link survives its way, with any characters", () => {
  const branch = branchOf("héllo☃𝄞");
  branch.asked = { ...branch.asked, prompt: "quote ' \" <b> \u202e 𝄞" };
  const link = linkOf(branch);
  const text = encodeLink(link);
  expect(text).toMatch(/^[\w-]+$/);
  expect(decodeLink(text)).toEqual(link);
  expect(link.seed).toBe(7);
});

test("what is no link is refused", () => {
  const encode = (value: unknown): string => btoa(JSON.stringify(value));
  for (const text of ["", "%%%", "bm90IGpzb24", encode(null), encode({ v: 2 }), encode({ v: 1, asked: { mode: "x" } }),
    encode({ v: 1, asked: { mode: "chat", prompt: "", messages: [{ content: 3 }], params: {} } })])
    expect(decodeLink(text)).toBeNull();
});

test("a request that was forked by hand begins with its tokens", () => {
  const branch = branchOf("abcd");
  expect(exactRequest(branch)).toEqual({ path: "/v1/completions", body: { prompt: "It's", max_tokens: 8, temperature: 0.8, seed: 7 } });
  const third = branch.tokens[2];
  if (third) third.given = true;
  expect(forkBody(branch)).toMatchObject({ output: [97, 98, 99], seed: 7, max_tokens: 4 });
  expect(asCurl(branch, "http://h")).toContain("/v1/fork");
});

test("commands are quoted for their language", () => {
  const curl = asCurl(branchOf("a"), "http://h");
  expect(curl).toContain(`"prompt":"It'\\''s"`);
  expect(asPython(branchOf("a"), "http://h")).toContain('json.loads("{\\"prompt\\":\\"It\'s\\"');
  expect(pythonString('a"\n')).toBe('"a\\"\\n"');
  const chat = branchOf("a");
  chat.asked = { mode: "chat", prompt: "x", messages: [{ role: "user", content: "x" }], params: { max_tokens: 4, logprobs: 2 } };
  expect(exactRequest(chat).body).toEqual({ messages: chat.asked.messages, max_completion_tokens: 4, logprobs: true, top_logprobs: 2, seed: 7 });
});

test("a command names its model, and takes a key from its environment alone", () => {
  const branch = branchOf("a");
  branch.model = "smollm2";
  expect(asCurl(branch, "http://h")).toContain('{"model":"smollm2",');
  expect(asCurl(branch, "http://h")).not.toContain("authorization");
  expect(asCurl(branch, "http://h", true)).toContain('-H "authorization: Bearer $UNSPOOL_API_KEY"');
  expect(asPython(branch, "http://h", true)).toContain('"Bearer " + os.environ["UNSPOOL_API_KEY"]');
  expect(asPython(branch, "http://h", true)).toContain("import os\n");
  expect(linkOf(branch).model).toBe("smollm2");
});

test("a table of the trace is safe for spreadsheets", () => {
  const branch = branchOf("");
  branch.tokens = [{ id: 1, text: '=cmd("x")', logprob: -1, rank: 1 }, { id: 2, text: 'a,"b"\n', logprob: -2, trace: trace() }];
  const lines = asCsv(branch).split("\r\n");
  expect(lines[1]).toContain(`"'=cmd(""x"")"`);
  expect(lines[2]).toContain("temperature 100; top_k 2");
});

test("a timeline for Perfetto names its tracks once", () => {
  const work = { request: 3, start: 0, tokens: 5, samples: 1 };
  const step = { number: 0, start: 1, seconds: 0.5, num_bytes: 9, flops: 9, works: [work], waiting: 0, blocks_free: 4 };
  const { traceEvents } = JSON.parse(asPerfetto([step, { ...step, number: 1, start: 2, works: [{ ...work, start: 5, tokens: 1 }] }]));
  expect(traceEvents.filter((event: { name: string; args: { name?: string } }) => event.args.name === "request 3")).toHaveLength(1);
  expect(traceEvents.filter((event: { tid: number; ph: string }) => event.tid === 4 && event.ph === "X").map((event: { name: string }) => event.name)).toEqual(["prefill", "decode"]);
});

test("prefill and decode are told apart", () => {
  expect(isPrefill({ start: 0, tokens: 1, samples: 1 })).toBe(true);
  expect(isPrefill({ start: 32, tokens: 16, samples: 0 })).toBe(true);
  expect(isPrefill({ start: 32, tokens: 1, samples: 1 })).toBe(false);
  expect(isPrefill({ start: 32, tokens: 4, samples: 4 })).toBe(false); // a draft
});

test("receipts and conversations", () => {
  const receipt = { model: "a".repeat(64), version: "1", kernels: "cpu-avx512", seed: 1 };
  expect(receiptDifferences(receipt, { ...receipt, seed: 2 })).toEqual([]);
  expect(receiptDifferences(receipt, { ...receipt, kernels: "cpu-avx2" })).toEqual(["kernels: cpu-avx2 then, cpu-avx512 here"]);
  expect(receiptDifferences(receipt, { ...receipt, overrides: ["rope_base=1"] })).toEqual(["overrides: rope_base=1 then, none here"]);
  expect(asMarkdown([{ role: "user", content: "Hi" }], "T")).toBe("# T\n\n## user\n\nHi\n");
  expect(tokens("ab")).toHaveLength(2);
});
