// The own clients of OpenAI and Anthropic against the gateway at PRISM_URL: each call as an application writes it. What a test in Python
// scripted the model to say is in the messages' own words: the model says what it is asked to.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.PRISM_URL}/v1`, apiKey: process.env.PRISM_KEY, maxRetries: 0 });
const claude = new Anthropic({ baseURL: process.env.PRISM_URL, apiKey: process.env.PRISM_KEY, maxRetries: 0 });
const model = process.env.PRISM_MODEL;
const embedder = process.env.PRISM_EMBEDDER;
const sleeper = process.env.PRISM_SLEEPER;
const messages = (text) => [{ role: "user", content: text }];
const tools = [
  {
    type: "function",
    function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
  },
];

const calls = {
  async "models.list and retrieve"() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.deepEqual(names.sort(), [model, embedder, sleeper].sort());
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async "a chat"() {
    const answer = await client.chat.completions.create({ model, messages: messages("hello"), n: 2 });
    assert.deepEqual(answer.choices.map((choice) => choice.message.content), ["hello", "hello"]);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.ok(answer.usage.total_tokens > answer.usage.prompt_tokens);
  },

  async "a chat that is streamed, with its usage"() {
    const stream = await client.chat.completions.create({
      model,
      messages: messages("héllo 世界"),
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, "héllo 世界");
    assert.ok(usage.completion_tokens > 0);
  },

  async "a completion, whole and streamed"() {
    const whole = await client.completions.create({ model, prompt: "one two", max_tokens: 2 });
    assert.equal(whole.choices[0].finish_reason, "length");
    let text = "";
    for await (const chunk of await client.completions.create({ model, prompt: "one two", stream: true })) {
      text += chunk.choices[0].text;
    }
    assert.equal(text, "one two");
  },

  async "a stop string"() {
    const answer = await client.chat.completions.create({ model, messages: messages("one two three"), stop: " two" });
    assert.equal(answer.choices[0].message.content, "one");
  },

  async "calls of tools, whole"() {
    const said = 'Look: <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>';
    const answer = await client.chat.completions.create({ model, messages: messages(said), tools });
    const [choice] = answer.choices;
    assert.equal(choice.finish_reason, "tool_calls");
    assert.equal(choice.message.content, "Look: ");
    assert.deepEqual(JSON.parse(choice.message.tool_calls[0].function.arguments), { city: "Bern" });
    const turns = [
      ...messages(said),
      choice.message,
      { role: "tool", tool_call_id: choice.message.tool_calls[0].id, content: "rain" },
    ];
    const after = await client.chat.completions.create({ model, messages: turns, tools });
    assert.equal(after.choices[0].message.content, "rain");
  },

  async "calls of tools, gathered by the client's own stream helper"() {
    const said = '[{"name": "weather", "parameters": {"city": "Bern"}}]';
    const stream = client.chat.completions.stream({ model, messages: messages(said), tools, tool_choice: "required" });
    const message = await stream.finalMessage();
    assert.equal(message.content, null);
    assert.equal(message.tool_calls[0].function.name, "weather");
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Bern" });
  },

  async "a JSON schema, parsed by the client"() {
    const schema = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
    const answer = await client.chat.completions.parse({
      model,
      messages: messages('{"a": 1}'),
      response_format: { type: "json_schema", json_schema: { name: "a", schema, strict: true } },
    });
    assert.equal(answer.choices[0].message.content, '{"a": 1}');
  },

  async "a response, whole, streamed and gathered by the client"() {
    const asked = { model, input: "one two", instructions: "Be brief." };
    const whole = await client.responses.create(asked);
    assert.equal(whole.output_text, "one two");
    assert.equal(whole.status, "completed");
    let text = "";
    let last = null;
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    assert.equal(text, "one two");
    assert.equal(last.type, "response.completed");
    const final = await client.responses.stream(asked).finalResponse();
    assert.equal(final.output[0].content[0].text, "one two");
    assert.deepEqual(final.usage, whole.usage);
  },

  async "a response that calls a tool, and the turn after it"() {
    const functions = tools.map((tool) => ({ type: "function", strict: false, ...tool.function }));
    const said = 'Look: <tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>';
    const input = messages(said);
    const answer = await client.responses.create({ model, input, tools: functions });
    const [, call] = answer.output;
    assert.deepEqual(JSON.parse(call.arguments), { city: "Bern" });
    const turns = [...input, ...answer.output, { type: "function_call_output", call_id: call.call_id, output: "rain" }];
    const after = await client.responses.create({ model, input: turns, tools: functions });
    assert.equal(after.output_text, "rain");
    await assert.rejects(client.responses.create({ model, input: "hello", background: true }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "background");
      return true;
    });
  },

  async "embeddings, in base64 as the client asks for them, and as numbers"() {
    const input = [[5, 6, 7], [8, 9]];
    const length = (vector) => Math.hypot(...vector);
    const written = [];
    for (const format of [{}, { encoding_format: "float" }]) {
      const answer = await client.embeddings.create({ model: embedder, input, ...format });
      assert.equal(answer.usage.prompt_tokens, 5);
      assert.deepEqual(answer.data.map((one) => one.index), [0, 1]);
      for (const one of answer.data) assert.ok(Math.abs(length(one.embedding) - 1) < 1e-6);
      written.push(answer.data.map((one) => Array.from(one.embedding)));
    }
    assert.deepEqual(written[0], written[1]);
    assert.deepEqual(written[0][1].map((value) => Math.round(100 * value)), [45, 89, 0, 0, 0, 0, 0, 0]);
    const short = await client.embeddings.create({ model: embedder, input: "hello", dimensions: 2 });
    assert.equal(short.data[0].embedding.length, 2);
    await assert.rejects(client.embeddings.create({ model, input: "hello" }), OpenAI.BadRequestError);
  },

  async "errors by the client's classes"() {
    const refused = (more) => client.chat.completions.create({ model, messages: messages("hello"), ...more });
    await assert.rejects(refused({ model: "none" }), OpenAI.NotFoundError);
    await assert.rejects(refused({ temperature: 3 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
    await assert.rejects(
      client.withOptions({ apiKey: "wrong" }).chat.completions.create({ model, messages: messages("hello") }),
      OpenAI.AuthenticationError,
    );
  },

  async "comments of a model that wakes, and an error after them"() {
    const asked = (text) => ({ model: sleeper, messages: messages(text), stream: true });
    let text = "";
    for await (const chunk of await client.chat.completions.create(asked("one two"))) {
      text += chunk.choices[0].delta.content ?? "";
    }
    assert.equal(text, "one two");
    const raw = await client.chat.completions.create(asked("one two")).asResponse();
    assert.match(await raw.text(), /^: waking\n\n/);
    await assert.rejects(async () => {
      for await (const chunk of await client.chat.completions.create(asked("impossible"))) assert.fail(chunk);
    }, /this is impossible/);
    await assert.rejects(async () => {
      const waiting = { model: sleeper, input: "impossible", stream: true };
      for await (const event of await client.responses.create(waiting)) assert.fail(event);
    }, /this is impossible/);
  },

  async "messages of Anthropic's client: whole, streamed, with a tool, counted, refused"() {
    const asked = (text) => ({ model, max_tokens: 200, messages: messages(text) });
    const whole = await claude.messages.create(asked("hello"));
    assert.deepEqual([whole.content[0].text, whole.stop_reason], ["hello", "end_turn"]);
    const streamed = await claude.messages.stream(asked("héllo 世界")).finalMessage();
    assert.equal(streamed.content[0].text, "héllo 世界");
    assert.ok(streamed.usage.output_tokens > 0);
    const tool = { name: "weather", input_schema: tools[0].function.parameters };
    const call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>';
    const called = await claude.messages.stream({ ...asked(call), tools: [tool] }).finalMessage();
    const used = called.content.find((block) => block.type === "tool_use");
    assert.deepEqual([used.name, used.input, called.stop_reason], ["weather", { city: "Oslo" }, "tool_use"]);
    assert.ok((await claude.messages.countTokens({ model, messages: messages("hello") })).input_tokens > 0);
    await assert.rejects(claude.messages.create({ ...asked("hello"), model: "none" }), Anthropic.NotFoundError);
  },

  async "a time-out, and a stream that is given up"() {
    const slow = { model, messages: messages("for ever") };
    await assert.rejects(client.chat.completions.create(slow, { timeout: 2000 }), OpenAI.APIConnectionTimeoutError);
    const stream = await client.chat.completions.create({ ...slow, stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) stream.controller.abort();
    }
  },
};

for (const [name, call] of Object.entries(calls)) {
  await call();
  console.log(name);
}
