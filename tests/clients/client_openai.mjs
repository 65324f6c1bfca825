// OpenAI's client for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, equal, holds, MODEL, refused, run, URL } from "./checking.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 300_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const Person = z.object({ name: z.string(), age: z.number().int() });
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"] },
  },
};
const extraction = { model: MODEL, messages: [{ role: "user", content: "Extract: Bob is 47 years old." }],
  response_format: zodResponseFormat(Person, "person"), temperature: 0, max_tokens: 60 };

check("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  holds(names.includes(MODEL), `${MODEL} is not in ${names}`);
});

check("chat and its stream", async () => {
  const body = { model: MODEL, messages, max_tokens: 24, temperature: 0.8, seed: 3 };
  const whole = await client.chat.completions.create(body);
  let text = "", usage = null;
  for await (const chunk of await client.chat.completions.create({
    ...body, stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  equal(text, whole.choices[0].message.content);
  equal(usage.completion_tokens, whole.usage.completion_tokens);
});

check("parsed answers", async () => {
  const answer = await client.chat.completions.parse(extraction);
  equal(answer.choices[0].message.parsed, { name: "Bob", age: 47 });
});

check("parsed stream", async () => {
  const stream = client.chat.completions.stream(extraction);
  const final = await stream.finalChatCompletion();
  equal(final.choices[0].message.parsed, { name: "Bob", age: 47 });
});

check("tools round trip", async () => {
  const body = { model: MODEL, messages, tools: [weather], tool_choice: "required", parallel_tool_calls: false,
    temperature: 0 };
  const answer = await client.chat.completions.create(body);
  const call = answer.choices[0].message.tool_calls[0];
  equal(call.function.name, "get_weather");
  holds(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city), call.function.arguments);
  const history = [...messages, answer.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
  await client.chat.completions.create({ model: MODEL, messages: history, tools: [weather], max_tokens: 8 });
});

check("a tool runner", async () => {
  let called = null;
  const runner = client.chat.completions.runTools({
    model: MODEL, messages, temperature: 0, max_tokens: 60, parallel_tool_calls: false,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [{ type: "function", function: { ...weather.function, parse: JSON.parse,
      function: (given) => ((called = given), "sunny") } }],
  });
  await runner.finalChatCompletion().catch(() => null); // the named choice asks for calls without end
  holds(called !== null, "the tool was not called");
});

check("completions", async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: "The sea is", max_tokens: 4, logprobs: 1 });
  holds(answer.choices[0].logprobs.tokens.length === 4, "no logprobs");
});

check("responses and their stream", async () => {
  const body = { model: MODEL, input: "What is the capital of France?", max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(body);
  holds(whole.output_text.includes("Paris"), whole.output_text);
  const kinds = new Set();
  let text = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    kinds.add(event.type);
    text += event.type === "response.output_text.delta" ? event.delta : "";
  }
  equal(text, whole.output_text);
  holds(kinds.has("response.created") && kinds.has("response.completed"), [...kinds].join());
});

check("an abort", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true, ignore_eos: true });
  for await (const _ of stream) break;
  stream.controller.abort();
  await client.chat.completions.create({ model: MODEL, messages, max_tokens: 2 });
});

check("errors", async () => {
  const error = await refused(client.chat.completions.create({ model: MODEL, messages, top_p: 7 }), "top_p");
  equal([error.status, error.param], [400, "top_p"]);
  equal((await refused(client.chat.completions.create({ model: "gpt-9", messages }), "gpt-9")).status, 404);
});

await run("openai");
