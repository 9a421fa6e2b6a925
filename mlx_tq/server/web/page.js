"use strict";
const $ = id => document.getElementById(id);
const number = n => n.toLocaleString("en");
const tokens = n => `${number(n)} ${n === 1 ? "token" : "tokens"}`;
const size = bytes => bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB`
  : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;

// Untrusted text is only ever set as text: nothing in it can become an element.
function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

// Invisible characters, and those that change the text direction, are shown as code points.
const INVISIBLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u{e0000}-\u{e007f}]/gu;
const visible = text => text.replace(INVISIBLE, c => `[U+${c.codePointAt().toString(16).toUpperCase().padStart(4, "0")}]`);

// State, stored in this tab until it is closed.

const SETTINGS = ["system", "temperature", "max-tokens", "key"];
const load = name => JSON.parse(sessionStorage.getItem(name));
let settings = load("settings") ?? {};
let chat = load("chat") ?? newChat();
let running = null, server = null;  // the AbortController of the current request; the server's /v1/plan

function newChat() {
  const random = crypto.getRandomValues(new Uint8Array(16));  // a session id that nobody can guess
  return { session: "page-" + Array.from(random, byte => byte.toString(16).padStart(2, "0")).join(""), turns: [], memory: null };
}

function save() {
  try {
    sessionStorage.setItem("settings", JSON.stringify(settings));
    sessionStorage.setItem("chat", JSON.stringify(chat));
  } catch {  // over the storage limit: the chat continues, but does not survive a reload
    sessionStorage.removeItem("chat");
  }
}

// The server

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(settings.key && { Authorization: `Bearer ${settings.key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("Cannot reach the server. Is it running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? response.statusText);
  error.status = response.status;
  throw error;
}

async function connect() {
  try {
    server = await (await request("/v1/plan")).json();
    $("model").textContent = visible(server.model);
    $("temperature").placeholder = server.temperature;
    $("max-tokens").placeholder = server.max_tokens;
    $("layout").replaceChildren(...layout(server).map(line => element("li", line)));
    showError("");
  } catch (error) {
    showError(error.message);
    if (error.status !== 401) return;
    $("model").textContent = "";
    openSettings("key");
  }
}

function layout({ plan, context_length, sessions, rescue }) {
  const lines = [];
  if (plan) {
    for (const { count, key, value } of plan.layers) lines.push(`${number(count)} layers: keys ${key}, values ${value}`);
    if (plan.other_layers) lines.push(`${number(plan.other_layers)} layers uncompressed`);
    lines.push(`First ${number(plan.sinks)} and last ${number(plan.window)} tokens in ${plan.dtype}`);
    const { policy, budget, recall } = plan.eviction ?? {};
    lines.push(policy ? `Eviction: ${policy}, budget ${typeof budget === "number" ? tokens(budget) : `${budget} of the tokens`}` : "No eviction");
    if (recall) lines.push("Evicted tokens are archived and recalled when a message needs them");
    if (rescue) lines.push("Evicted text is searched and quoted when a message needs it");
  } else {
    lines.push("mlx-lm's own cache, uncompressed");
  }
  if (context_length) lines.push(`Context window: ${tokens(context_length)}`);
  if (!sessions) lines.push("Sessions are off: the server processes the whole chat for each message");
  return lines;
}

// Yield the objects of an event stream; its comments report the progress of the prefill.
async function* events(response, progress) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(error => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The server closed the connection before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) progress(part.slice(2));
      else if (part === "data: [DONE]") return;
      else if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

// A turn

function requestBody() {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = chat.turns.map(({ role, content }) => ({ role, content }));
  const body = { messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  if (settings.temperature) body.temperature = +settings.temperature;
  if (settings["max-tokens"]) body.max_tokens = +settings["max-tokens"];
  return body;
}

async function send(text) {
  running = new AbortController();
  showError("");
  chat.turns.push({ role: "user", content: text });
  const turn = { role: "assistant", content: "" };
  const question = show(chat.turns.at(-1)), item = show(turn);
  item.classList.add("busy");
  setBusy(true);
  showEnd();
  let fault = "";
  try {
    await generate(turn, item);
  } catch (error) {
    turn.stopped = true;
    if (error.name !== "AbortError") fault = error.message;
    if (error.status === 401) openSettings("key");
  }
  item.classList.remove("busy");
  if (turn.stopped && !turn.content) {  // no answer: put the message back into the input
    chat.turns.pop();
    question.remove();
    item.remove();
    $("message").value = [text, $("message").value].filter(Boolean).join("\n");
    fit();
  } else {
    chat.turns.push(turn);
    item.append(...details(turn));
  }
  running = null;
  setBusy(false);
  showStatus(turn.stopped && !fault ? "Stopped" : "");
  showError(fault);
  showMemory();
  save();
}

async function generate(turn, item) {
  const headers = { "Content-Type": "application/json", ...(server?.sessions !== 0 && { "X-MLX-TQ-Session": chat.session }) };
  const options = { method: "POST", headers, body: JSON.stringify(requestBody()), signal: running.signal };
  const stream = await request("/v1/chat/completions", options);
  for await (const event of events(stream, showStatus)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    const { content, reasoning } = choice?.delta ?? {};
    if (reasoning) showReasoning(item, reasoning);
    if (content) {
      turn.content += content;
      item.querySelector(".content").append(visible(content));
    }
    if (content || reasoning) showStatus("Generating");
    if (choice?.finish_reason) turn.finish = choice.finish_reason;
    if (event.usage) turn.usage = event.usage;
    if (event.session) {
      const { recalled, recalled_by_search, recall_partial, recall_ms, rescued, quoted } = event.session;
      turn.session = { recalled, recalled_by_search, recall_partial, recall_ms, rescued, quoted };
      chat.memory = event.session;
    }
  }
}

function showReasoning(item, text) {
  if (!item.querySelector(".reasoning")) {
    const details = element("details", "", "reasoning");
    details.append(element("summary", "Reasoning"), element("p"));
    item.querySelector(".content").before(details);
  }
  item.querySelector(".reasoning p").append(visible(text));
}

// Display

function show(turn) {
  const item = element("li", "", turn.role);
  item.append(element("h2", turn.role === "user" ? "You" : "Assistant"), element("p", visible(turn.content), "content"), ...details(turn));
  if (turn.role === "user" && (turn.content.length > 1200 || turn.content.split("\n").length > 12)) fold(item);
  $("messages").append(item);
  $("empty").hidden = true;
  return item;
}

function fold(item) {
  const button = element("button", "", "plain");
  button.onclick = () => {
    const folded = item.classList.toggle("folded");
    button.textContent = folded ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", !folded);
    if (folded) item.scrollIntoView({ block: "nearest" });
  };
  item.append(button);
  button.click();
}

function details({ usage, session, finish, stopped }) {
  const lines = [];
  if (usage) lines.push(`prompt ${tokens(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)}, generated ${number(usage.completion_tokens)}`);
  if (finish === "length") lines.push("stopped at max tokens");
  if (stopped) lines.push("stopped");
  if (session?.recalled) {
    const bySearch = session.recalled_by_search;
    lines.push(`recalled ${tokens(session.recalled)}${bySearch ? ` (${number(bySearch)} by search)` : ""} in ${number(session.recall_ms)} ms${session.recall_partial ? ", partial: a recalled sentence is incomplete" : ""}`);
  }
  const nodes = lines.length ? [element("p", lines.join(", "), "facts")] : [];
  if (!session?.rescued) return nodes;
  const quotation = element("details"), list = element("ul", "", "quotes");
  for (const { start, stop, text } of session.quoted) {
    const quote = element("li", visible(text));
    quote.prepend(element("small", `tokens ${number(start)} to ${number(stop)}`));
    list.append(quote);
  }
  quotation.append(element("summary", `Quoted: ${tokens(session.rescued)}`), list);
  return [...nodes, quotation];
}

function showMemory() {
  const { memory } = chat, bar = $("bar");
  const { tokens: seen = 0, live = 0, archived = 0, dropped = 0 } = memory ?? {};
  const total = Math.max(memory?.context_length ?? 0, seen, 1);
  [live, archived, dropped].forEach((count, place) => bar.children[place].style.width = `${count / total * 100}%`);
  if (!memory) {
    $("usage").replaceChildren();
    bar.setAttribute("aria-label", "The cache is empty");
    return;
  }
  const compared = seen >= memory.compressed_from && memory.bytes !== memory.native_bytes;
  const parts = [["live", `${number(live)} live`], ["archived", archived && `${number(archived)} archived`],
    ["evicted", dropped && `${number(dropped)} dropped`], ["", memory.recalled && `${number(memory.recalled)} recalled`],
    ["", memory.rescued && `${number(memory.rescued)} quoted`],
    ["", size(memory.bytes) + (compared ? `, ${memory.native_dtype} cache ${size(memory.native_bytes)}` : "")]].filter(([, text]) => text);
  $("usage").replaceChildren(...parts.map(([name, text]) => element("span", text, name)));
  bar.setAttribute("aria-label", `${parts.map(([, text]) => text).join(", ")}, of ${tokens(total)}`);
}

// The end stays in view, whatever grows or shrinks, until the user scrolls up.
const main = document.querySelector("main");
let following = true, lastTop = 0;
const atEnd = () => main.scrollHeight - main.scrollTop - main.clientHeight < 4;

function follow() {
  following ||= atEnd();
  if (following) main.scrollTop = main.scrollHeight;
  $("latest").hidden = following;
}

function showEnd() {
  following = true;
  follow();
}

main.onscroll = () => {
  // A scroll down may be our own, and the end have moved on since.
  if (main.scrollTop < lastTop) following = false;
  lastTop = main.scrollTop;
  following ||= atEnd();
  $("latest").hidden = following;
};

function setBusy(busy) {
  $("send").hidden = $("new-chat").disabled = busy;
  $("stop").hidden = !busy;
  $("messages").setAttribute("aria-busy", busy);  // screen readers read the complete answer, not each token
  if (busy) showStatus("Waiting");
}

function showStatus(text) {
  if ($("status").textContent !== text) $("status").textContent = text;  // screen readers repeat what is set again
}

function showError(text) {
  $("error").textContent = visible(text);
}

function fit() {
  const { style } = $("message");
  style.height = "auto";
  style.height = `${$("message").scrollHeight + 2}px`;
}

// Events

$("message").oninput = fit;
$("message").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
};
$("composer").onsubmit = event => {
  event.preventDefault();
  const text = $("message").value;
  if (running || !text.trim()) return;
  $("message").value = "";
  fit();
  send(text);
};
$("latest").onclick = () => { showEnd(); $("message").focus(); };
$("messages").onclick = event => {  // what the user opens stays in view
  if (event.target.closest("summary, button")) following = false;
};
$("stop").onclick = () => { running?.abort(); $("message").focus(); };
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});

function openSettings(field) {
  for (const name of SETTINGS) $(name).value = settings[name] ?? "";
  $("settings").returnValue = "";
  if (!$("settings").open) $("settings").showModal();
  $(field).focus();
}
$("open-settings").onclick = () => openSettings("system");
$("settings").onclose = () => {
  if ($("settings").returnValue === "done") {
    for (const name of SETTINGS) settings[name] = $(name).value.trim();
    save();
    connect();
  }
  $("message").focus();
};

$("new-chat").onclick = () => {
  if (!chat.turns.length) { $("message").focus(); return; }
  $("confirm").returnValue = "cancel";
  $("confirm").showModal();
};
$("confirm").onclose = () => {
  if ($("confirm").returnValue === "new") {
    request(`/v1/sessions/${chat.session}`, { method: "DELETE" }).catch(() => {});  // not worth waiting for
    chat = newChat();
    $("messages").replaceChildren();
    $("empty").hidden = false;
    showError("");
    showMemory();
    save();
  }
  $("message").focus();
};

chat.turns.forEach(show);
showMemory();
const sizes = new ResizeObserver(follow);
[main, $("messages")].forEach(node => sizes.observe(node));
connect();
