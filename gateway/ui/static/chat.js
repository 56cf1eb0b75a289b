// A conversation with one model, by the same path and with the same key as any client's.
import { attribute, el, keyed, text } from "./dom.js";
import { ask } from "./keys.js";
import * as waking from "./waking.js";

const at = (id) => document.getElementById(id);
let turns = []; // {role, content}, as they are sent; another list for each conversation
let running = null; // {abort, answer} of the answer that is being made
let unchosen = true;

function bubble(role, who) {
  const content = el("div", { class: "content" });
  const made = el("article", { class: `turn ${role}`, "aria-label": who }, el("h3", {}, who), content);
  at("chat-log").append(made);
  return { made, content };
}

class Answer {
  constructor(model) {
    this.model = model;
    const { made, content } = bubble("assistant", model);
    this.node = made;
    this.content = content;
    this.reasoning = el("div", { class: "content" });
    this.thought = el("details", { hidden: "" }, el("summary", {}, "Reasoning"), this.reasoning);
    this.figures = el("p", { class: "figures" });
    made.insertBefore(this.thought, content);
    made.append(this.figures);
    this.asked = performance.now();
    this.first = this.last = 0;
    this.events = 0;
    this.tokens = null;
    this.finish = null;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const thought = choice.delta?.reasoning_content ?? "";
    const words = choice.delta?.content ?? "";
    if (!thought && !words) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.events += 1;
    this.thought.toggleAttribute("hidden", !this.reasoning.textContent && !thought);
    this.reasoning.append(thought);
    this.content.append(words);
    this.tell();
  }

  // By this page's clock. Tokens are counted by the gateway once the answer has ended, and until then by its events.
  tell() {
    if (!this.first) return;
    const tokens = this.tokens ?? this.events;
    const parts = [`first token after ${((this.first - this.asked) / 1000).toFixed(2)} s`];
    if (tokens > 1 && this.last > this.first) parts.push(`${((1000 * (tokens - 1)) / (this.last - this.first)).toFixed(1)} tokens/s`);
    parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (this.finish && this.finish !== "stop") parts.push(this.finish === "length" ? "cut at the most tokens" : this.finish);
    text(this.figures, parts.join(", "));
  }
}

// The JSON of each event of a stream of server-sent events.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && !line.startsWith("data: [DONE]")) yield JSON.parse(line.slice(6));
  }
}

function status(words, bad = false) {
  text(at("chat-status"), words);
  at("chat-status").classList.toggle("bad", bad);
}

// Whoever has scrolled up to read is left there.
function atEnd() {
  const log = at("chat-log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 24;
}

function toEnd() {
  at("chat-log").scrollTop = at("chat-log").scrollHeight;
}

function busy(is) {
  attribute(at("chat-log"), "aria-busy", String(is));
  at("chat-stop").toggleAttribute("hidden", !is);
  at("chat-send").toggleAttribute("hidden", is);
}

async function send() {
  const asked = at("chat-message").value.trim();
  const model = at("chat-model").value;
  if (running || !asked) return;
  if (!model) return status("There is no model to ask.", true);
  const question = bubble("user", "You");
  text(question.content, asked);
  const own = turns;
  own.push({ role: "user", content: asked });
  at("chat-message").value = "";
  const answer = new Answer(model);
  toEnd();
  running = { abort: new AbortController(), answer };
  busy(true);
  status("waiting for the first token");
  const focused = document.activeElement === at("chat-send");
  if (focused) at("chat-stop").focus();
  const system = at("chat-system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...own];
  let ended = "";
  let bad = false;
  try {
    const body = JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true } });
    const headers = { "content-type": "application/json" };
    const told = await ask("../v1/chat/completions", { method: "POST", headers, body, signal: running.abort.signal });
    for await (const event of events(told)) {
      const follows = atEnd();
      answer.take(event);
      if (answer.first) status("answering");
      if (follows) toEnd();
    }
    if (!answer.finish) throw new Error("the answer ended before its end");
    ended = "answered";
  } catch (error) {
    const stopped = running.abort.signal.aborted;
    ended = stopped ? "stopped" : error instanceof TypeError ? "the connection to the gateway was lost" : error.message;
    bad = !stopped;
  }
  answer.tell();
  const content = answer.content.textContent;
  if (content) own.push({ role: "assistant", content });
  else {
    // Nothing was said: the question may be asked again.
    own.pop();
    if (!answer.first && own === turns) {
      question.made.remove();
      answer.node.remove();
      at("chat-message").value ||= asked;
    }
  }
  running = null;
  const back = document.activeElement === at("chat-stop");
  busy(false);
  if (back || document.activeElement === document.body) at("chat-message").focus();
  if (own === turns) status(ended, bad);
}

function clear() {
  running?.abort.abort();
  turns = [];
  at("chat-log").replaceChildren();
  status("");
  at("chat-message").focus();
}

export function open() {
  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  at("chat-message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  at("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort.abort();
  });
  at("chat-stop").addEventListener("click", () => running?.abort.abort());
  at("chat-clear").addEventListener("click", clear);
}

// Another key may put right what was wrong.
export function keyChanged() {
  if (!running && at("chat-status").classList.contains("bad")) status("");
}

// Models that answer in words; while the first token is waited for, how far the model is that comes up for it.
export function show(state) {
  const models = state.models.filter((each) => each.generates);
  const list = at("chat-model");
  const chosen = list.value;
  keyed(list, models, ({ model }) => model, ({ model }) => el("option", { value: model }, model), () => {});
  if (unchosen && models.length) {
    const first = models.find((each) => each.state === "active") ?? models.find((each) => !each.error) ?? models[0];
    list.value = first.model;
    unchosen = false;
  } else if (models.some(({ model }) => model === chosen)) list.value = chosen;
  if (!running || running.answer.first) return;
  const up = waking.all(state).find(({ model }) => model === running.answer.model);
  status(up ? `the model comes up: ${up.words}` : "waiting for the first token");
}
