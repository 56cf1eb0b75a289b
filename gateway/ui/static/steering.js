// All models: how far those are that come up, and with an admin's key buttons that wake, put to sleep, pin and move.
import { attribute, counted, el, keyed, text } from "./dom.js";
import { ask, steers } from "./keys.js";
import * as waking from "./waking.js";

const WAIT_S = 600; // the longest that the gateway lets an answer wait
const SAID_MS = 60_000; // how long an outcome stays
const UP = new Set(["active", "waking"]);
const DOWN = new Set(["cold", "on disk", "hibernating"]);
const at = (id) => document.getElementById(id);
const under = new Map(); // model -> what is under way for it
const said = new Map(); // model -> {words, bad}: how the last of it ended
let state = null;
let again = () => {};

const path = (model, action) => `../v1/models/${model.split("/").map(encodeURIComponent).join("/")}/${action}`;
const places = (model) =>
  state.groups.flatMap((group) => group.models.filter((each) => each.model === model).map((each) => ({ ...each, group: group.group })));

// What cannot be done now stays where it is, so that the focus does too.
function able(button, is) {
  attribute(button, "aria-disabled", String(!is));
}

async function steer(model, action, doing, parameters = {}) {
  under.set(model, doing);
  said.delete(model);
  again();
  try {
    const query = new URLSearchParams({ wait_s: WAIT_S, ...parameters });
    const answer = await ask(`${path(model, action)}?${query}`, { method: "POST" });
    const told = await answer.json();
    const words = answer.status === 202 ? `${doing}; it goes on` : (told.reason ?? "");
    if (words) said.set(model, { words, bad: false, at: performance.now() });
  } catch (error) {
    said.set(model, { words: error.message, bad: true, at: performance.now() });
  }
  under.delete(model);
  again();
}

// Resolves to what the dialog's button returns; empty if it was left by Esc or Cancel.
function asked(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

async function sleep(model) {
  const requests = places(model).reduce((sum, each) => ({ running: sum.running + each.running, waiting: sum.waiting + each.waiting }), { running: 0, waiting: 0 });
  if (requests.running + requests.waiting) {
    const has = `${counted(requests.running, "request")} running and ${requests.waiting} waiting`;
    text(at("sleep-question"), `${model} has ${has}. Those that run are paused, and all of them bring it up again.`);
    if ((await asked(at("sleep-dialog"))) !== "yes") return;
  }
  await steer(model, "sleep", "going to sleep");
}

async function move(model) {
  const here = new Set(places(model).filter((each) => UP.has(each.state)).map((each) => each.group));
  const groups = state.groups.filter((group) => group.reachable && !group.drained && !here.has(group.group));
  at("move-group").replaceChildren(...groups.map(({ group }) => el("option", {}, group)));
  text(at("move-question"), `Move ${model} to another group. It serves all the while.`);
  if ((await asked(at("move-dialog"))) === "yes") await steer(model, "move", "moving", { to: at("move-group").value });
}

const ACTIONS = {
  wake: (model) => steer(model, "wake", "waking"),
  sleep,
  pin: (model, pinned) => steer(model, pinned ? "unpin" : "pin", pinned ? "taking the pin back" : "pinning"),
  move,
};

function make({ model }) {
  const actions = el("span", { class: "actions", role: "group", "aria-label": `Steer ${model}` });
  for (const [action, title] of [["wake", "Wake"], ["sleep", "Sleep"], ["pin", "Pin image"], ["move", "Move…"]]) {
    const button = el("button", { type: "button", "data-action": action }, title);
    button.addEventListener("click", () => {
      if (button.getAttribute("aria-disabled") !== "true") ACTIONS[action](model, button.getAttribute("aria-pressed") === "true");
    });
    actions.append(button);
  }
  const head = el("div", { class: "about" }, el("b", {}, model), el("span", { class: "state" }), el("span", { class: "where" }));
  return el("li", {}, head, actions, el("span", { class: "outcome", role: "status" }), el("div", { class: "bars" }));
}

function update(row, model, up) {
  const [head, actions, outcome, bars] = row.children;
  const on = places(model.model).filter((each) => !DOWN.has(each.state) || each.state === "hibernating");
  const [, is, where] = head.children;
  attribute(is, "class", `state ${model.state.replace(" ", "-")}`);
  text(is, model.state);
  const adapts = model.base ? `an adapter of ${model.base}` : "";
  const facts = [on.map((each) => each.group).join(", "), adapts, model.pinned ? "pinned" : "", model.error ?? ""];
  text(where, facts.filter(Boolean).join("; "));
  keyed(bars, up.filter((each) => each.model === model.model), (each) => each.group, waking.make, waking.update);
  actions.toggleAttribute("hidden", !steers());
  const [wake, sleepy, pin, moving] = actions.children;
  const known = !under.has(model.model);
  able(wake, known && !UP.has(model.state));
  const free = known && !model.base; // an adapter is where its base is
  able(sleepy, free && (model.state === "active" || model.state === "waking"));
  able(pin, free && !model.pinned);
  attribute(pin, "aria-pressed", String(model.image_pinned));
  able(moving, free && model.state === "active" && state.groups.length > 1);
  if (performance.now() - said.get(model.model)?.at > SAID_MS) said.delete(model.model);
  const last = under.has(model.model) ? { words: `${under.get(model.model)}…`, bad: false } : said.get(model.model);
  text(outcome, last?.words ?? "");
  outcome.classList.toggle("bad", last?.bad ?? false);
}

// Steps are read out as they begin, not every second of them.
let told = new Map();

function announce(up) {
  const now = new Map(state.models.map(({ model, state: is }) => [model, is]));
  for (const { model, waking } of up) now.set(model, waking.step);
  const news = [...now].filter(([model, step]) => told.has(model) && told.get(model) !== step);
  if (news.length) text(at("announced"), news.map(([model, step]) => `${model}: ${step}`).join("; "));
  told = now;
}

export function open(refresh) {
  again = refresh;
}

export function show(parent, newest, matches) {
  state = newest;
  const up = waking.all(state);
  const models = state.models.filter(({ model }) => matches(model));
  keyed(parent, models, ({ model }) => model, make, (row, model) => update(row, model, up));
  parent.toggleAttribute("data-empty", models.length === 0);
  at("no-keys").toggleAttribute("hidden", state.keys);
  announce(up);
}
