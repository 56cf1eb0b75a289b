// Who waits where, and how much time the most urgent has.
import { attribute, bytes, counted, el, seconds, table, text } from "./dom.js";

const MOST_NAMES = 8;
const LASTING = new Set(["cold", "on disk"]);
let longest = 1;

const number = (value) => (value === null || value === undefined ? "–" : String(value));

function waiting(cell, row) {
  if (!cell.firstChild) cell.append(el("span", { class: "count" }), el("i", { class: "queue" }, el("i", { class: "late" })));
  text(cell.firstChild, row.waiting ? `${row.waiting}${row.late ? `, ${row.late} late` : ""}` : "0");
  cell.lastChild.style.width = `${(5 * row.waiting) / longest}rem`;
  cell.lastChild.firstChild.style.width = `${row.waiting ? (100 * (row.late ?? 0)) / row.waiting : 0}%`;
}

function slack(cell, row) {
  text(cell, row.least_slack_s === null ? (row.waiting ? "no target" : "–") : seconds(row.least_slack_s));
  cell.classList.toggle("bad", row.least_slack_s !== null && row.least_slack_s < 0);
}

function state(cell, row) {
  if (!cell.firstChild) cell.append(el("span", { class: "state" }));
  attribute(cell.firstChild, "class", `state ${row.state.replace(" ", "-")}`);
  text(cell.firstChild, row.state);
}

const COLUMNS = [
  { title: "Model", of: (row) => row.model, header: true },
  { title: "Group", of: (row) => row.group },
  { title: "State", draw: state },
  { title: "Waiting", draw: waiting, number: true },
  { title: "Least slack", draw: slack, number: true },
  { title: "Running", of: (row) => number(row.running), number: true },
  { title: "Tokens/s", of: (row) => row.tokens_per_s.toFixed(0), number: true },
  { title: "KV held", of: (row) => bytes(row.kv_bytes), number: true },
  { title: "KV limit", of: (row) => (row.kv_limit_bytes > 0 ? bytes(row.kv_limit_bytes) : "–"), number: true },
  { title: "Idle", of: (row) => (row.running || row.waiting ? "–" : seconds(row.idle_s, 1)), number: true },
];
const queues = table("Models on groups, with their queues", COLUMNS);

// The models by name with their states; many of them by number, since the list of all has their names.
function few(models) {
  if (models.length <= MOST_NAMES) return models.map(({ model, state }) => `${model} (${state})`).join(", ");
  const counts = new Map();
  for (const { state } of models) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${counted(count, "model")} ${state}`).join(", ");
}

export function show(parent, note, state, matches) {
  if (!queues.isConnected) parent.append(queues);
  const rows = state.groups
    .flatMap((group) => group.models.map((model) => ({ ...model, group: group.group })))
    .filter((row) => matches(row.model) && (!LASTING.has(row.state) || row.waiting));
  rows.sort((a, b) => a.model.localeCompare(b.model) || a.group.localeCompare(b.group));
  longest = Math.max(1, ...rows.map((row) => row.waiting));
  queues.fill(rows, (row) => `${row.model}\n${row.group}`);
  const here = new Set(rows.map((row) => row.model));
  const away = state.models.filter((model) => matches(model.model) && !here.has(model.model));
  const errors = away.filter((model) => model.error).map((model) => `${model.model} is in error: ${model.error}`);
  const rest = away.filter((model) => !model.error && !model.base);
  const adapters = away.filter((model) => !model.error && model.base).map((model) => `${model.model} (of ${model.base})`);
  const doubted = state.models.filter((model) => matches(model.model) && model.unverified).map((model) => model.model);
  const unverified = doubted.length ? `Unverified (nobody has compared their answers): ${doubted.join(", ")}` : "";
  const onNoDevice = rest.length ? `On no device: ${few(rest)}` : "";
  const ofBases = adapters.length ? `Adapters: ${adapters.slice(0, MOST_NAMES).join(", ")}${adapters.length > MOST_NAMES ? ", …" : ""}` : "";
  text(note, [...errors, unverified, onNoDevice, ofBases].filter(Boolean).join(". "));
}
