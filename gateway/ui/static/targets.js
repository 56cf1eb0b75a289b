// How many of the requests with a target were on time: since the gateway started, and in the last minute of this page.
import { attribute, el, table, text } from "./dom.js";

const RECENT_S = 60;
const seen = []; // {at, attainment}, oldest first
let before = {};

export function heard(state) {
  const at = performance.now() / 1000;
  seen.push({ at, attainment: state.attainment });
  while (seen.length > 1 && seen[1].at < at - RECENT_S) seen.shift();
  before = seen[0].attainment;
}

const NONE = { met: 0, missed: 0 };

function counts(row, target, recent) {
  const all = row.targets[target] ?? NONE;
  if (!recent) return all;
  const then = before[row.model]?.[target] ?? NONE;
  const since = { met: all.met - then.met, missed: all.missed - then.missed };
  return since.met < 0 || since.missed < 0 ? all : since; // the gateway started anew
}

function meter(target, recent) {
  return (cell, row) => {
    if (!cell.firstChild) cell.append(el("span", { class: "meter" }, el("i")), el("span", { class: "share" }));
    const { met, missed } = counts(row, target, recent);
    const share = met + missed ? met / (met + missed) : null;
    cell.firstChild.firstChild.style.width = `${100 * (share ?? 0)}%`;
    attribute(cell.firstChild, "class", `meter ${share === null ? "none" : share >= 0.95 ? "good" : share >= 0.8 ? "fair" : "poor"}`);
    // Rounded down: 100 % means all.
    text(cell.lastChild, share === null ? "–" : `${(Math.floor(1000 * share) / 10).toFixed(1)} % of ${met + missed}`);
  };
}

const targets = table("Requests on time, by model", [
  { title: "Model", of: (row) => row.model, header: true },
  { title: "First token, last minute", draw: meter("ttft", true) },
  { title: "First token, since start", draw: meter("ttft", false) },
  { title: "Time per token, last minute", draw: meter("tpot", true) },
  { title: "Time per token, since start", draw: meter("tpot", false) },
]);
const empty = el("p", { class: "empty" }, "No request with a target has ended yet.");

export function show(parent, state, matches) {
  if (!targets.isConnected) parent.append(empty, targets);
  const rows = Object.entries(state.attainment)
    .map(([model, found]) => ({ model, targets: found }))
    .filter((row) => matches(row.model))
    .sort((a, b) => a.model.localeCompare(b.model));
  empty.toggleAttribute("hidden", rows.length > 0);
  targets.toggleAttribute("hidden", rows.length === 0);
  targets.fill(rows, (row) => row.model);
}
