// The AI SDK with @ai-sdk/openai (Responses, chat, completions) and @ai-sdk/openai-compatible.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.LMKIT_URL + "/v1";
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "lmkit", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const Person = z.object({ name: z.string(), age: z.number().int() });
const weather = tool({
  description: "Get the current weather in a city",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
  execute: async () => ({ temperature: 21 }),
});
const models = { responses: openai("demo"), chat: openai.chat("demo"), compatible: compatible("demo") };
const options = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

for (const [name, model] of Object.entries(models)) {
  test(name + ": generateText", async () => {
    const { text, usage, responseMessages, response } = await generateText({ model, prompt: "What is 12 + 30?", ...options });
    assert.match(text, /42/);
    assert.ok(usage.outputTokens > 0);
    const messages = [
      { role: "user", content: "What is 12 + 30?" }, ...(responseMessages ?? response.messages), { role: "user", content: "What is 20 + 3?" },
    ];
    assert.match((await generateText({ model, messages, ...options })).text, /23/);
  });

  test(name + ": streamText", async () => {
    const errors = [];
    const result = streamText({ model, prompt: "What is 12 + 30?", ...options, onError: ({ error }) => errors.push(error) });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert.deepEqual(errors, []);
    assert.equal(text, (await generateText({ model, prompt: "What is 12 + 30?", ...options })).text);
  });

  for (const streamed of [false, true]) {
    test(name + ": tools" + (streamed ? " streamed" : ""), async () => {
      const asked = {
        model, prompt: "What is the weather in Berlin?", tools: { get_weather: weather }, stopWhen: stepCountIs(2), ...options,
      };
      const result = streamed ? streamText(asked) : await generateText(asked);
      assert.ok(await result.text);
      const steps = await result.steps;
      assert.deepEqual(steps[0].toolCalls.map((call) => [call.toolName, call.input]), [["get_weather", { city: "Berlin" }]]);
    });
  }

  test(name + ": structured output", async () => {
    const prompt = 'Write JSON with the keys "name" and "age" for Anna, who is 31.';
    const result = await generateText({ model, prompt, output: Output.object({ schema: Person }), ...options });
    assert.deepEqual(Object.keys(result.output), ["name", "age"]);
  });
}

test("reasoning", async () => {
  const result = await generateText({
    model: models.compatible, prompt: "What is 28 + 35?", ...options,
    providerOptions: { lmkit: { chat_template_kwargs: { enable_thinking: true } } },
  });
  assert.ok(result.reasoningText);
});

for (const [name, made] of [["@ai-sdk/openai", openai.completion("demo")], ["compatible", compatible.completionModel("demo")]]) {
  test(name + ": completions", async () => {
    const { text } = await generateText({ model: made, prompt: "Hello", ...options, maxOutputTokens: 8 });
    assert.ok(text);
  });
}

test("embeddings", async () => {
  const embedder = createOpenAI({ baseURL: process.env.LMKIT_EMBED_URL + "/v1", apiKey: "none" });
  const { embeddings } = await embedMany({ model: embedder.embedding("demo"), values: ["a", "b"] });
  assert.deepEqual(embeddings.map((one) => one.length), [256, 256]);
});
