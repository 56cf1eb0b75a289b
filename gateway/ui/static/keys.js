// The visitor's key: asked for in a dialog, kept in this tab's storage, sent in the Authorization header and nowhere else.
import { attribute, text } from "./dom.js";

const KEPT = "prism.key";
const at = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEPT) ?? "";
let needed = null; // whether the gateway has keys; null: it has not said
let admin = false;
let changed = () => {};

// An answer of the gateway. Throws an Error with its words if it refuses, or does not answer.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let answer;
  try {
    // "omit": the password that opened this page is not sent along, and none is asked for in its place.
    const url = new URL(path, location.origin + location.pathname); // a name and password in the address stay out
    answer = await fetch(url, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the gateway does not answer");
  }
  if (answer.ok) return answer;
  if (answer.status === 401 && !key) throw new Error("Enter a key first, at the top of this page.");
  const told = await answer.json().catch(() => null);
  const error = new Error(told?.error?.message ?? `the gateway answers with ${answer.status} ${answer.statusText}`);
  error.status = answer.status;
  throw error;
}

export const steers = () => admin;

// Whether the key is an admin's is what the gateway says to it: the page's own state is for admins only.
async function check() {
  admin = false;
  if (!key) return { usable: false, words: "No key was entered." };
  if (/[^\x21-\x7e]/.test(key)) return { usable: false, words: "A key has letters, digits and signs of ASCII only." };
  try {
    await (await ask("state.json")).body.cancel();
    admin = true;
    return { usable: true, words: "" };
  } catch (error) {
    const usable = error.status === 403;
    return { usable, words: usable ? `${error.message} Models can be tried with it, and not steered.` : error.message };
  }
}

function tell() {
  at("key").toggleAttribute("hidden", !needed);
  text(at("key"), admin ? "Admin's key" : key ? "Key" : "Enter a key");
  at("key-forget").toggleAttribute("hidden", !key);
  changed();
}

// `has`: whether the gateway has keys.
export async function heard(has) {
  if (has === needed) return;
  needed = has;
  if (needed && key) await check();
  tell();
}

export function open(onChange) {
  changed = onChange;
  const dialog = at("key-dialog");
  const field = at("key-field");
  at("key").addEventListener("click", () => {
    field.value = "";
    text(at("key-fault"), "");
    dialog.showModal();
  });
  at("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const before = key;
    key = field.value.trim();
    const { usable, words } = await check();
    if (usable) sessionStorage.setItem(KEPT, key);
    else if ((key = before)) await check();
    text(at("key-fault"), words);
    at("key-fault").classList.toggle("bad", !usable);
    attribute(field, "aria-invalid", String(!usable));
    tell();
    if (words) field.select();
    else dialog.close();
  });
  at("key-forget").addEventListener("click", () => {
    key = "";
    admin = false;
    sessionStorage.removeItem(KEPT);
    tell();
    dialog.close();
  });
  at("key-close").addEventListener("click", () => dialog.close());
}
