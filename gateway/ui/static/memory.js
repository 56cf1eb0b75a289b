// A card for each device: whose its memory is now, how that went, and the same as a table.
import { attribute, bytes, el, keyed, table, text } from "./dom.js";
import { History } from "./history.js";

const PARTS = [
  ["weights", "weights_bytes"],
  ["used", "kv_used_bytes"],
  ["cached", "kv_cached_bytes"],
  ["reserve", "kv_reserve_bytes"],
];
const COLUMNS = [
  { title: "Model", of: (o) => o.model, header: true },
  { title: "Weights", of: (o) => bytes(o.weights_bytes), number: true },
  { title: "KV, running", of: (o) => bytes(o.kv_used_bytes), number: true },
  { title: "Cached", of: (o) => bytes(o.kv_cached_bytes), number: true },
  { title: "Reserve", of: (o) => bytes(o.kv_reserve_bytes), number: true },
  { title: "Private", of: (o) => bytes(o.private_bytes), number: true },
];

const held = (owner) => PARTS.reduce((sum, [, field]) => sum + owner[field], 0);
const total = (device, field) => device.owners.reduce((sum, owner) => sum + owner[field], 0);

function make({ device }) {
  const owners = table(`Memory of ${device.device} by model`, COLUMNS);
  const card = el(
    "article",
    { class: "device", "aria-label": `device ${device.device}` },
    el("h3", {}, device.device),
    el("p", { class: "facts" }),
    el("div", { class: "bar", role: "img" }),
    el("details", {}, el("summary", {}, "Models as a table"), el("div", { class: "scroll" }, owners)),
  );
  card.parts = { facts: card.children[1], bar: card.children[2], details: card.children[3], owners };
  card.history = new History(device.device);
  card.insertBefore(card.history.canvas, card.parts.details);
  card.parts.details.addEventListener("toggle", () => fillTable(card));
  return card;
}

function fillTable(card) {
  if (card.parts.details.open) card.parts.owners.fill(card.device.owners, (owner) => owner.model);
}

function segment(block, part, size, capacity) {
  block.style.width = `${(100 * size) / capacity}%`;
  attribute(block, "class", `part ${part}`);
}

function makeOwner(model) {
  const name = el("b", {}, model.split("/").at(-1));
  return el("span", { class: "owner" }, name, ...PARTS.map(() => el("span")));
}

function fillBar(bar, device, hue, matches) {
  const blocks = device.owners.filter((owner) => held(owner) > 0);
  const rest = ["private", "stranded"].map((part) => ({ model: ` ${part}`, part, size: device[`${part}_bytes`] }));
  keyed(
    bar,
    [...blocks, ...rest.filter((each) => each.size > 0)],
    (each) => each.model,
    (each) => (each.part ? el("span") : makeOwner(each.model)),
    (node, each) => {
      if (each.part) return segment(node, each.part, each.size, device.capacity_bytes);
      const size = held(each);
      node.style.width = `${(100 * size) / device.capacity_bytes}%`;
      node.style.setProperty("--hue", hue.get(each.model) ?? 0);
      node.classList.toggle("dim", !matches(each.model));
      attribute(node, "title", `${each.model}: ${PARTS.map(([name, field]) => `${name} ${bytes(each[field])}`).join(", ")}`);
      PARTS.forEach(([name, field], i) => segment(node.children[i + 1], name, each[field], size));
    },
  );
}

function spoken(device) {
  const models = device.owners.filter((owner) => held(owner) > 0).map((owner) => `${owner.model} ${bytes(held(owner))}`);
  const free = `${bytes(device.free_bytes)} of ${bytes(device.capacity_bytes)} free`;
  return `${device.device}: ${free}; ${models.join(", ") || "no model"}; private ${bytes(device.private_bytes)}`;
}

function update(card, { device, group }, hue, matches, fresh) {
  card.device = device;
  const state = group.reachable ? (group.drained ? "drained, " : "") : "its gpu_scheduler is away, ";
  const digits = group.pressure < 0.0001 ? "0" : Number(Number(group.pressure).toPrecision(2)).toString();
  const pressure = group.pressure === "infinite" ? "∞" : digits;
  const shared = group.devices.length > 1 ? `group ${group.group}, ` : "";
  text(card.parts.facts, `${state}${shared}${bytes(device.free_bytes)} of ${bytes(device.capacity_bytes)} free, pressure ${pressure}`);
  card.classList.toggle("away", !group.reachable);
  attribute(card.parts.bar, "aria-label", spoken(device));
  fillBar(card.parts.bar, device, hue, matches);
  fillTable(card);
  if (fresh) {
    const sums = PARTS.map(([name, field]) => [name, total(device, field)]);
    card.history.add(Object.fromEntries([...sums, ["private", device.private_bytes + device.stranded_bytes]]), device.capacity_bytes);
  }
  card.history.draw();
}

// `fresh`: placement told this now; what it told earlier is not drawn as if it were still so.
export function show(parent, state, hue, matches, fresh) {
  const devices = state.groups.flatMap((group) => group.devices.map((device) => ({ device, group })));
  parent.classList.toggle("many", devices.length > 8);
  const name = ({ device, group }) => `${group.group} ${device.device}`;
  keyed(parent, devices, name, make, (card, each) => update(card, each, hue, matches, fresh));
  parent.toggleAttribute("data-empty", devices.length === 0);
}
