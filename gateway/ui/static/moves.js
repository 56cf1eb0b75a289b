// What placement decided and what state each model was in, by time.
import { attribute, counted, el, keyed, seconds, table, text } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 22;
const LETTER = 7; // width of most letters in the drawing
const MOST_ROWS = 40;
const SIGNS = { activate: "▲", migrate: "⇄", replicate: "⧉", hibernate: "▽", "go cold": "▼", refuse: "✕" };
const LASTING = new Set(["cold", "on disk"]);
const KEPT_S = 3600;

const strips = new Map(); // model -> [{state, from, to}], as seen since the page was opened
const decisions = table("Placement's last decisions, newest first", [
  { title: "When", of: (d) => `${seconds(now() - d.at)} ago`, number: true },
  { title: "Model", of: (d) => d.model, header: true },
  { title: "Action", of: (d) => d.action },
  { title: "Group", of: (d) => d.group },
  { title: "Outcome", of: (d) => d.outcome },
  { title: "Why", of: (d) => d.reason },
]);
let list = [];

const now = () => performance.now() / 1000;
const svg = (tag, attributes = {}) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

// A decision's age is told once; from then on it is a moment of this page's clock. "stay" moves nothing.
export function heard(state, fresh) {
  const at = now();
  if (state.decisions) {
    list = state.decisions.map((each, i) => ({ ...each, at: at - each.age_s, number: state.decisions.length - i }));
  }
  if (!fresh) return;
  for (const { model, state: is } of state.models) {
    const strip = strips.get(model) ?? strips.set(model, []).get(model);
    const last = strip.at(-1);
    if (last && last.state === is && at - last.to < 5) last.to = at;
    else {
      if (last && at - last.to < 5) last.to = at;
      strip.push({ state: is, from: at, to: at });
    }
    while (strip.length && strip[0].to < at - KEPT_S) strip.shift();
  }
}

const failed = (decision) => decision.outcome.startsWith("failed");

function sign(decision) {
  return failed(decision) ? "✕" : (SIGNS[decision.action] ?? "•");
}

function rows(since, matches) {
  const latest = new Map();
  for (const decision of list) {
    if (decision.at > since && decision.action !== "stay" && !latest.has(decision.model)) latest.set(decision.model, decision.at);
  }
  for (const [model, strip] of strips) {
    if (strip.some((each) => each.to > since && !LASTING.has(each.state)) && !latest.has(model)) latest.set(model, 0);
  }
  const chosen = [...latest].filter(([model]) => matches(model)).sort((a, b) => b[1] - a[1]).slice(0, MOST_ROWS);
  return chosen.map(([model]) => model).sort((a, b) => a.localeCompare(b));
}

function makeRow(model) {
  const row = svg("g");
  row.append(svg("text", { class: "name", x: 4, y: 15 }), svg("g"), svg("g"));
  const whole = svg("title");
  whole.textContent = model;
  row.append(whole);
  return row;
}

// The name, without its middle where that would run into the drawing: names of models often differ at their ends.
function short(model, width) {
  const most = Math.max(5, Math.floor((width - 12) / LETTER));
  const kept = Math.floor((most - 1) / 2);
  return model.length <= most ? model : `${model.slice(0, kept)}…${model.slice(-kept)}`;
}

function draw(row, model, index, x, since, end) {
  text(row.children[0], short(model, x(since)));
  attribute(row, "transform", `translate(0 ${index * ROW})`);
  const strip = (strips.get(model) ?? []).filter((each) => each.to > since && !LASTING.has(each.state));
  const makeStrip = ({ state }) => svg("rect", { class: `strip ${state}`, y: 4, height: ROW - 8 });
  keyed(row.children[1], strip, (each) => each.from, makeStrip, (rect, each) => {
    const from = x(Math.max(since, each.from));
    attribute(rect, "x", from.toFixed(1));
    attribute(rect, "width", Math.max(1, x(each.to) - from).toFixed(1));
  });
  const marks = list.filter((each) => each.model === model && each.at > since && each.action !== "stay");
  keyed(row.children[2], marks, (each) => `${each.number} ${each.action} ${each.outcome}`, makeMark, (mark, each) => {
    const from = x(each.at);
    const until = each.took_s ? each.at + each.took_s : each.outcome === "under way" ? end : each.at;
    attribute(mark.children[1], "x", from.toFixed(1));
    attribute(mark.children[1], "width", Math.max(1, x(until) - from).toFixed(1));
    attribute(mark.children[2], "x", from.toFixed(1));
  });
}

function makeMark(decision) {
  const mark = svg("g", { class: failed(decision) || decision.action === "refuse" ? "mark bad" : "mark" });
  const title = svg("title");
  title.textContent = `${decision.model}: ${decision.action} ${decision.group}, ${decision.outcome}. ${decision.reason}`;
  const letter = svg("text", { y: 16, "text-anchor": "middle" });
  letter.textContent = sign(decision);
  mark.append(title, svg("rect", { y: 17, height: 2 }), letter);
  return mark;
}

let line;

export function show(parent, decisionParent, span_s, matches) {
  if (!line) {
    line = svg("svg", { class: "line", role: "img" });
    line.append(svg("g", { class: "grid" }), svg("g"));
    parent.append(line, el("p", { class: "empty", hidden: "" }, "Nothing moved."));
  }
  const end = now();
  const since = end - span_s;
  const models = rows(since, matches);
  const width = parent.clientWidth;
  const left = Math.min(220, width * 0.3);
  const x = (at) => left + ((at - since) / span_s) * (width - left - 10);
  const height = models.length * ROW + 20;
  line.toggleAttribute("hidden", models.length === 0);
  parent.lastChild.toggleAttribute("hidden", models.length > 0);
  attribute(line, "viewBox", `0 0 ${width} ${height}`);
  attribute(line, "height", String(height));
  const moved = list.filter((each) => each.at > since && each.action !== "stay").length;
  const said = `${counted(moved, "decision")} about ${counted(models.length, "model")} in the last ${seconds(span_s)}`;
  attribute(line, "aria-label", `${said}; the table below lists them`);
  const ticks = [0, 1, 2, 3, 4].map((i) => ({ i, ago: span_s * (1 - i / 4) }));
  keyed(line.children[0], ticks, (tick) => tick.i, (tick) => {
    const made = svg("g");
    made.append(svg("line", { y1: 0 }), svg("text", { "text-anchor": tick.i === 4 ? "end" : "middle" }));
    return made;
  }, (node, tick) => {
    const at = x(end - tick.ago).toFixed(1);
    for (const [name, value] of [["x1", at], ["x2", at], ["y2", String(height - 16)]]) attribute(node.children[0], name, value);
    attribute(node.children[1], "x", at);
    attribute(node.children[1], "y", String(height - 3));
    text(node.children[1], tick.ago ? `−${seconds(tick.ago)}` : "now");
  });
  models.forEach((model, index) => (strips.get(model) ?? strips.set(model, []).get(model)).index = index);
  keyed(line.children[1], models, (model) => model, makeRow, (row, model) => draw(row, model, strips.get(model).index, x, since, end));
  if (!decisions.isConnected) decisionParent.append(decisions);
  if (decisionParent.parentElement.open) decisions.fill(list.filter((each) => matches(each.model)), (each) => each.number);
}
