// How far a model is that comes up: a bar, and the same in words.
import { attribute, bytes, el, seconds, text } from "./dom.js";

const began = new Map(); // "group model" -> {step, done, at} when its step was first seen: for a rate that nobody told

function rate(place, waking) {
  if (waking.per_s !== null) return waking.per_s;
  const now = performance.now() / 1000;
  const first = began.get(place);
  if (first?.step !== waking.step || first.done > waking.done) {
    began.set(place, { step: waking.step, done: waking.done, at: now });
    return null;
  }
  return now - first.at > 0.5 && waking.done > first.done ? (waking.done - first.done) / (now - first.at) : null;
}

// "reading checkpoint, 1.2 GiB of 16 GiB, 500 MiB/s, 30 s left".
function words(place, waking) {
  const size = (count) => (waking.unit === "bytes" ? bytes(count) : Math.round(count).toString());
  const parts = [waking.step || "waiting"];
  if (waking.unit === "kernels" || waking.unit === "graphs") parts.push(`${waking.done} ${waking.unit} so far`);
  else if (waking.unit === "bytes" && waking.total) {
    const per_s = rate(place, waking);
    parts.push(`${size(waking.done)} of ${size(waking.total)}`);
    if (per_s) parts.push(`${size(per_s)}/s`);
    const left = waking.left_s ?? (per_s ? (waking.total - waking.done) / per_s : null);
    if (left !== null) parts.push(`${seconds(left, 0)} left`);
  }
  if (waking.kernels && waking.unit !== "kernels") parts.push(`${waking.kernels} kernels compiled`);
  return parts.join(", ");
}

// [{model, group, waking, words}] of all models that come up.
export function all(state) {
  const places = state.groups.flatMap((group) =>
    group.models.filter((each) => each.waking).map(({ model, waking }) => ({ model, group: group.group, waking })),
  );
  const keys = new Set(places.map((each) => `${each.group} ${each.model}`));
  for (const place of began.keys()) if (!keys.has(place)) began.delete(place);
  return places.map((each) => ({ ...each, words: words(`${each.group} ${each.model}`, each.waking) }));
}

export function make() {
  return el("div", { class: "waking-on" }, el("progress"), el("span"));
}

export function update(node, { model, group, waking, words }) {
  const [bar, said] = node.children;
  if (waking.total > 0 && waking.unit === "bytes") {
    attribute(bar, "max", String(waking.total));
    attribute(bar, "value", String(waking.done));
  } else bar.removeAttribute("value");
  attribute(bar, "aria-label", `${model} comes up on ${group}`);
  text(said, `${words} (${group}, ${seconds(waking.seconds, 0)})`);
}
