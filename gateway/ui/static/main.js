// The stream, what it says of itself, and the parts of the page. A page that nobody sees closes its stream.
import { attribute, hues, seconds, text } from "./dom.js";
import * as chat from "./chat.js";
import * as keys from "./keys.js";
import * as memory from "./memory.js";
import * as moves from "./moves.js";
import * as queues from "./queues.js";
import * as steering from "./steering.js";
import * as targets from "./targets.js";

const at = (id) => document.getElementById(id);
const status = at("status");
const AWAY = "placement is away";
let stream = null;
let state = null; // the last that came
let cameAt = 0;
let gateway = false; // whether it answers
let paused = false;

const names = (model) => [model, ...(state?.models.find((each) => each.model === model)?.aliases ?? [])];
const sought = () => at("filter").value.trim().toLowerCase();
const matches = (model) => names(model).some((name) => name.toLowerCase().includes(sought()));
const fresh = () => gateway && state.placement.away === null;

// The age moves every second: it is not in the status, which is read out whenever it changes.
function tell() {
  const [kind, words] = paused
    ? ["paused", "paused"]
    : !gateway
      ? ["away", state ? "the gateway does not answer" : "waiting for the gateway"]
      : state.placement.away !== null
        ? ["away", AWAY.includes(state.placement.away) ? AWAY : `${AWAY} (${state.placement.away})`]
        : ["live", "live"];
  const told = state?.placement.age_s ?? null;
  const age = told === null ? 0 : told + (performance.now() - cameAt) / 1000;
  attribute(status, "data-state", kind);
  text(status, words);
  text(at("age"), told === null || kind === "live" ? "" : `; shown is what was told ${seconds(age, 0)} ago`);
  document.body.classList.toggle("old", kind === "away");
}

function show() {
  tell();
  if (!state) return;
  steering.show(at("model-list"), state, matches);
  chat.show(state);
  memory.show(at("devices"), state, hues(state.models), matches, fresh());
  queues.show(at("queue-table"), at("elsewhere"), state, matches);
  moves.show(at("line"), at("decision-table"), Number(at("span").value), matches);
  targets.show(at("target-table"), state, matches);
}

function open() {
  if (stream || paused || document.hidden) return;
  stream = new EventSource("events");
  stream.addEventListener("state", (event) => {
    state = JSON.parse(event.data);
    cameAt = performance.now();
    gateway = true;
    keys.heard(state.keys);
    moves.heard(state, fresh());
    targets.heard(state);
    show();
  });
  stream.addEventListener("error", () => {
    gateway = false;
    tell();
    // The browser opens it again by itself unless it was refused.
    if (stream?.readyState === EventSource.CLOSED) {
      close();
      setTimeout(open, 2000);
    }
  });
}

function close() {
  stream?.close();
  stream = null;
}

at("pause").addEventListener("click", () => {
  paused = !paused;
  attribute(at("pause"), "aria-pressed", String(paused));
  text(at("pause"), paused ? "Go on" : "Pause");
  if (paused) close();
  else open();
  tell();
});
document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
at("filter").addEventListener("input", show);
at("span").addEventListener("change", show);
at("decision-table").parentElement.addEventListener("toggle", show);
addEventListener("resize", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
steering.open(() => state && show());
keys.open(() => {
  chat.keyChanged();
  if (state) show();
});
chat.open();
setInterval(tell, 1000);
open();
