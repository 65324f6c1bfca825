import { expect, test } from "vitest";
import { EventParser } from "../src/sse.js";

const encode = (text: string): Uint8Array => new TextEncoder().encode(text);

test("events come whole, however the bytes are cut", () => {
  const data = encode('data: {"a":"é☃𝄞"}\n\n: still here\n\nevent: x\ndata: 2\n\ndata: [DONE]\n\n');
  for (let size = 1; size <= data.length; size++) {
    const parser = new EventParser();
    const found: string[] = [];
    for (let start = 0; start < data.length; start += size) found.push(...parser.push(data.slice(start, start + size)));
    expect(found).toEqual(['{"a":"é☃𝄞"}', "2", "[DONE]"]);
  }
});

test("an event that is not whole is not given", () => {
  expect(new EventParser().push(encode("data: 1\n"))).toEqual([]);
});
