// The OpenAI library for JavaScript: chat, Responses, embeddings, files.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const options = { apiKey: "none", maxRetries: 0 };
const client = new OpenAI({ baseURL: process.env.LMKIT_URL + "/v1", ...options });
const embedder = new OpenAI({ baseURL: process.env.LMKIT_EMBED_URL + "/v1", ...options });
const greedy = { model: "demo", temperature: 0 };
const ask = (content) => [{ role: "user", content }];
const SUM = ask("What is 12 + 30?");
const Person = z.object({ name: z.string(), age: z.number().int() });
const JSON_TEXT = 'Write JSON with the keys "name" and "age" for Anna, who is 31.';
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    parse: JSON.parse,
    function: async () => '{"temperature": 21}',
  },
};

test("chat", async () => {
  const { choices } = await client.chat.completions.create({ ...greedy, messages: SUM });
  assert.match(choices[0].message.content, /42/);
  const again = [...SUM, choices[0].message, ...ask("What is 20 + 3?")];
  const next = await client.chat.completions.create({ ...greedy, messages: again });
  assert.match(next.choices[0].message.content, /23/);
});

test("chat streamed", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages: SUM });
  const stream = client.chat.completions.stream({ ...greedy, messages: SUM, stream_options: { include_usage: true } });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
});

for (const stream of [false, true]) {
  test("run tools" + (stream ? " streamed" : ""), async () => {
    const runner = client.chat.completions.runTools({
      ...greedy, stream, messages: ask("What is the weather in Berlin?"), tools: [weather],
    });
    assert.ok(await runner.finalContent());
    assert.equal(runner.messages.filter((m) => m.role === "tool").length, 1);
  });
}

test("chat parse", async () => {
  const answer = await client.chat.completions.parse({
    ...greedy, messages: ask(JSON_TEXT), response_format: zodResponseFormat(Person, "person"),
  });
  assert.deepEqual(Object.keys(answer.choices[0].message.parsed), ["name", "age"]);
});

test("responses", async () => {
  const first = await client.responses.create({ ...greedy, input: "What is 12 + 30?" });
  assert.match(first.output_text, /42/);
  const second = await client.responses.create({ ...greedy, input: "What is 20 + 3?", previous_response_id: first.id });
  assert.match(second.output_text, /23/);
});

test("responses streamed", async () => {
  const final = await client.responses.stream({ ...greedy, input: "What is 12 + 30?" }).finalResponse();
  assert.match(final.output_text, /42/);
});

test("completions streamed", async () => {
  let text = "";
  for await (const part of await client.completions.create({ ...greedy, prompt: "Hello", max_tokens: 8, stream: true }))
    text += part.choices[0]?.text ?? "";
  const whole = await client.completions.create({ ...greedy, prompt: "Hello", max_tokens: 8 });
  assert.equal(text, whole.choices[0].text);
});

test("abort", async () => {
  const stream = await client.chat.completions.create({ ...greedy, messages: SUM, stream: true });
  for await (const _ of stream) stream.controller.abort();
});

test("embeddings", async () => {
  const { data } = await embedder.embeddings.create({ model: "demo", input: ["a", "b"] });
  assert.deepEqual(data.map((one) => one.embedding.length), [256, 256]);
});

test("files and batches", async () => {
  const body = { model: "demo", messages: SUM, max_tokens: 8 };
  const line = { custom_id: "a", method: "POST", url: "/v1/chat/completions", body };
  const file = await client.files.create({
    file: await OpenAI.toFile(Buffer.from(JSON.stringify(line)), "requests.jsonl"), purpose: "batch",
  });
  let batch = await client.batches.create({
    input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
  });
  while (!["completed", "failed"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.request_counts.completed, 1);
  const text = await (await client.files.content(batch.output_file_id)).text();
  assert.equal(JSON.parse(text).custom_id, "a");
});

test("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...greedy, model: "nosuch", messages: SUM }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...greedy, messages: SUM, top_p: 7 }), OpenAI.BadRequestError);
});
