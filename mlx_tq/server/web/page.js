"use strict";
const $ = id => document.getElementById(id);
const number = n => n.toLocaleString("en");
const tokens = n => `${number(n)} ${n === 1 ? "token" : "tokens"}`;
const size = bytes => bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB`
  : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;

// What others wrote is only ever set as text: nothing in it can become an element.
function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Characters that are not seen, or that turn the direction of what is, are shown by their number.
const UNSEEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u{e0000}-\u{e007f}]/gu;
const visible = text => text.replace(UNSEEN, c => `[U+${c.codePointAt().toString(16).toUpperCase().padStart(4, "0")}]`);

// What is kept: by this tab, until it is closed.

const SETTINGS = ["system", "temperature", "max-tokens", "key"];
const kept = name => JSON.parse(sessionStorage.getItem(name));
let settings = kept("settings") ?? {};
let chat = kept("chat") ?? begun();
let running = null, server = null;  // the request in progress; what the server said of itself

function begun() {
  const random = crypto.getRandomValues(new Uint8Array(16));  // nobody can guess whose session it is
  return { session: "page-" + Array.from(random, byte => byte.toString(16).padStart(2, "0")).join(""), turns: [], memory: null };
}

function keep() {
  try {
    sessionStorage.setItem("settings", JSON.stringify(settings));
    sessionStorage.setItem("chat", JSON.stringify(chat));
  } catch {  // more than a tab may keep: it goes on, and only a reload begins anew
    sessionStorage.removeItem("chat");
  }
}

// The server

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(settings.key && { Authorization: `Bearer ${settings.key}` }) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  const error = new Error(said?.error?.message ?? answer.statusText);
  error.status = answer.status;
  throw error;
}

async function meet() {
  try {
    server = await (await ask("/v1/plan")).json();
    $("model").textContent = visible(server.model);
    $("temperature").placeholder = server.temperature;
    $("max-tokens").placeholder = server.max_tokens;
    $("stored").replaceChildren(...stored(server).map(line => element("li", line)));
    fail("");
  } catch (error) {
    fail(error.message);
    if (error.status !== 401) return;
    $("model").textContent = "";
    open("key");
  }
}

function stored({ plan, positions, sessions, rescue }) {
  const lines = [];
  if (plan) {
    for (const { count, key, value } of plan.layers) lines.push(`${number(count)} layers: keys in ${key}, values in ${value}`);
    if (plan.others) lines.push(`${number(plan.others)} layers as they are`);
    lines.push(`The first ${number(plan.prefix)} tokens and the last ${number(plan.window)} stay in ${plan.dtype}`);
    const { policy, budget, recall } = plan.eviction ?? {};
    lines.push(policy ? `${policy} keeps ${typeof budget === "number" ? tokens(budget) : `${budget} of the tokens`}` : "No token leaves");
    if (recall) lines.push("What leaves is archived, and comes back for a question that needs it");
    if (rescue) lines.push("The text of what leaves is kept, and quoted where a question needs it");
  } else {
    lines.push("In mlx-lm's own caches: nothing is compressed");
  }
  if (positions) lines.push(`The model takes ${tokens(positions)}`);
  lines.push(sessions ? "A conversation is kept between its turns" : "This server keeps no conversation: each turn reads all of it");
  return lines;
}

// Events of a stream, one object each; a number of comments says how much of the prompt was read.
async function* events(answer, progress) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(error => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The server went away before the answer was complete.");
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

function request() {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const said = chat.turns.map(({ role, content }) => ({ role, content }));
  const body = { messages: [...system, ...said], stream: true, stream_options: { include_usage: true } };
  if (settings.temperature) body.temperature = +settings.temperature;
  if (settings["max-tokens"]) body.max_tokens = +settings["max-tokens"];
  return body;
}

async function send(text) {
  running = new AbortController();
  fail("");
  chat.turns.push({ role: "user", content: text });
  const turn = { role: "assistant", content: "" };
  const asked = show(chat.turns.at(-1)), item = show(turn);
  item.classList.add("busy");
  busy(true);
  let fault = "";
  try {
    await answer(turn, item);
  } catch (error) {
    turn.stopped = true;
    if (error.name !== "AbortError") fault = error.message;
    if (error.status === 401) open("key");
  }
  item.classList.remove("busy");
  if (turn.stopped && !turn.content) {  // nothing was said: the question is as if it had not been asked
    chat.turns.pop();
    asked.remove();
    item.remove();
    $("message").value = [text, $("message").value].filter(Boolean).join("\n");
    fit();
  } else {
    chat.turns.push(turn);
    follow(() => item.append(...facts(turn)));
  }
  running = null;
  busy(false);
  say(turn.stopped && !fault ? "Stopped" : "");
  fail(fault);
  showMemory();
  keep();
}

async function answer(turn, item) {
  const headers = { "Content-Type": "application/json", ...(server?.sessions !== 0 && { "X-Session-Id": chat.session }) };
  const options = { method: "POST", headers, body: JSON.stringify(request()), signal: running.signal };
  const stream = await ask("/v1/chat/completions", options);
  for await (const event of events(stream, say)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    const { content, reasoning } = choice?.delta ?? {};
    if (reasoning) think(item, reasoning);
    if (content) {
      turn.content += content;
      follow(() => item.querySelector(".words").append(visible(content)));
    }
    if (content || reasoning) say("Answering");
    if (choice?.finish_reason) turn.finish = choice.finish_reason;
    if (event.usage) turn.usage = event.usage;
    if (event.session) {
      const { recalled, recalled_by_meaning, recall_ms, rescued, quoted } = event.session;
      turn.session = { recalled, recalled_by_meaning, recall_ms, rescued, quoted };
      chat.memory = event.session;
    }
  }
}

function think(item, text) {
  if (!item.querySelector(".thoughts")) {
    const made = element("details", "", "thoughts");
    made.append(element("summary", "What it thought"), element("p"));
    item.querySelector(".words").before(made);
  }
  follow(() => item.querySelector(".thoughts p").append(visible(text)));
}

// What is shown

function show(turn) {
  const item = element("li", "", turn.role);
  item.append(element("h2", turn.role === "user" ? "You" : "Answer"), element("p", visible(turn.content), "words"), ...facts(turn));
  follow(() => $("talk").append(item));
  $("empty").hidden = true;
  return item;
}

function facts({ usage, session, finish, stopped }) {
  const lines = [];
  if (usage) lines.push(`${tokens(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)} read, ${number(usage.completion_tokens)} said`);
  if (finish === "length") lines.push("ended at the limit of tokens");
  if (stopped) lines.push("stopped");
  if (session?.recalled) {
    const named = session.recalled_by_meaning;
    lines.push(`${tokens(session.recalled)} recalled${named ? `, ${number(named)} of them by search` : ""} in ${number(session.recall_ms)} ms`);
  }
  const made = lines.length ? [element("p", lines.join(", "), "facts")] : [];
  if (!session?.rescued) return made;
  const details = element("details"), list = element("ul", "", "quotes");
  for (const { start, stop, text } of session.quoted) {
    const quote = element("li", visible(text));
    quote.prepend(element("small", `tokens ${number(start)} to ${number(stop)}`));
    list.append(quote);
  }
  details.append(element("summary", `Brought back: ${tokens(session.rescued)}`), list);
  return [...made, details];
}

function showMemory() {
  const { memory } = chat, bar = $("bar");
  const { tokens: seen = 0, live = 0, evicted = 0, archived = 0 } = memory ?? {};
  const total = Math.max(memory?.positions ?? 0, seen, 1), gone = evicted - archived;
  [live, archived, gone].forEach((count, place) => bar.children[place].style.width = `${count / total * 100}%`);
  if (!memory) {
    $("figures").replaceChildren();
    bar.setAttribute("aria-label", "nothing is in the cache yet");
    return;
  }
  const parts = [["live", `${number(live)} live`], ["archived", archived && `${number(archived)} archived`],
    ["evicted", gone && `${number(gone)} evicted`], ["", memory.recalled && `${number(memory.recalled)} recalled`],
    ["", memory.rescued && `${number(memory.rescued)} rescued`],
    ["", `${size(memory.bytes)}, fp16 ${size(memory.fp16_bytes)}`]].filter(([, text]) => text);
  $("figures").replaceChildren(...parts.map(([name, text]) => element("span", text, name)));
  bar.setAttribute("aria-label", `${parts.map(([, text]) => text).join(", ")}, of ${tokens(total)}`);
}

// What grows stays in sight, unless its reader has scrolled away.
function follow(change) {
  const main = document.querySelector("main");
  const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 40;
  change();
  if (atEnd) main.scrollTop = main.scrollHeight;
}

function busy(is) {
  $("send").hidden = $("anew").disabled = is;
  $("stop").hidden = !is;
  $("talk").setAttribute("aria-busy", is);  // read aloud when it is complete, not by the token
  if (is) say("Waiting");
}

function say(text) {
  if ($("state").textContent !== text) $("state").textContent = text;  // what stays the same is not read aloud again
}

function fail(text) {
  $("fault").textContent = visible(text);
}

function fit() {
  const { style } = $("message");
  style.height = "auto";
  style.height = `${$("message").scrollHeight + 2}px`;
}

// What is done

$("message").oninput = fit;
$("message").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("ask").onsubmit = event => {
  event.preventDefault();
  const text = $("message").value;
  if (running || !text.trim()) return;
  $("message").value = "";
  fit();
  send(text);
};
$("stop").onclick = () => { running?.abort(); $("message").focus(); };
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});

function open(field) {
  for (const name of SETTINGS) $(name).value = settings[name] ?? "";
  $("settings").returnValue = "";
  if (!$("settings").open) $("settings").showModal();
  $(field).focus();
}
$("set").onclick = () => open("system");
$("settings").onclose = () => {
  if ($("settings").returnValue === "done") {
    for (const name of SETTINGS) settings[name] = $(name).value.trim();
    keep();
    meet();
  }
  $("message").focus();
};

$("anew").onclick = () => {
  if (!chat.turns.length) { $("message").focus(); return; }
  $("sure").returnValue = "keep";
  $("sure").showModal();
};
$("sure").onclose = () => {
  if ($("sure").returnValue === "forget") {
    ask(`/v1/sessions/${chat.session}`, { method: "DELETE" }).catch(() => {});  // the server drops it in its own time
    chat = begun();
    $("talk").replaceChildren();
    $("empty").hidden = false;
    fail("");
    showMemory();
    keep();
  }
  $("message").focus();
};

chat.turns.forEach(show);
showMemory();
meet();
