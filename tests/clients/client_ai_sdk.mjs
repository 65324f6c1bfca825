// Vercel's AI SDK with its provider for servers that speak OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, equal, holds, MODEL, refused, run, URL } from "./checking.mjs";

const provider = createOpenAICompatible({ name: "unspool", baseURL: `${URL}/v1`, includeUsage: true,
  supportsStructuredOutputs: true });
const model = provider(MODEL);
const prompt = "What is the capital of France?";
const Person = z.object({ name: z.string(), age: z.number().int() });
const get_weather = tool({ description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }), execute: async ({ city }) => `sunny in ${city}` });
const common = { model, temperature: 0, maxRetries: 0 };

check("generateText", async () => {
  const answer = await generateText({ ...common, prompt, system: "Be brief.", maxOutputTokens: 12 });
  holds(answer.text.includes("Paris"), answer.text);
  holds(answer.usage.outputTokens > 0 && answer.usage.inputTokens > 0, JSON.stringify(answer.usage));
});

check("streamText equals generateText", async () => {
  const options = { ...common, prompt, maxOutputTokens: 24 };
  const whole = await generateText(options);
  const stream = streamText(options);
  let text = "";
  for await (const part of stream.textStream) text += part;
  equal(text, whole.text);
  equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  equal(await stream.finishReason, whole.finishReason);
});

check("objects", async () => {
  const answer = await generateText({ ...common, prompt: "Extract: Bob is 47 years old.",
    output: Output.object({ schema: Person }), maxOutputTokens: 60 });
  equal(answer.output, { name: "Bob", age: 47 });
});

check("objects in a stream", async () => {
  const stream = streamText({ ...common, prompt: "Extract: Bob is 47 years old.",
    output: Output.object({ schema: Person }), maxOutputTokens: 60 });
  let last = null;
  for await (const part of stream.partialOutputStream) last = part;
  equal(last, { name: "Bob", age: 47 });
});

check("tools", async () => {
  const answer = await generateText({ ...common, prompt, tools: { get_weather }, maxOutputTokens: 60,
    toolChoice: { type: "tool", toolName: "get_weather" }, stopWhen: stepCountIs(1) });
  equal(answer.toolCalls[0].toolName, "get_weather");
  holds(answer.toolResults[0].output.startsWith("sunny in"), JSON.stringify(answer.toolResults));
});

check("tools in a stream, then a second step", async () => {
  const stream = streamText({ ...common, prompt, tools: { get_weather }, maxOutputTokens: 60,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {
      toolChoice: { type: "tool", toolName: "get_weather" } }) });
  const kinds = new Set();
  for await (const part of stream.fullStream) {
    kinds.add(part.type);
    if (part.type === "error") throw part.error;
  }
  holds(kinds.has("tool-call") && kinds.has("tool-result"), [...kinds].join());
  equal((await stream.steps).length, 2);
});

check("errors", async () => {
  await refused(generateText({ ...common, prompt, topP: 7 }), "top_p");
  await refused(generateText({ ...common, prompt: "word ".repeat(20_000) }), "maximum context length");
});

await run("ai");
