// The list of messages. A message is built once; while an answer grows, only its last elements change.
import { $, button, element, escapeInvisible, fitHeight, formatNumber, formatPercent, formatTokens } from "./elements.js";
import { showMarkdown } from "./markdown.js";

const LEAST_DELAY = 30, SHARE = 4;  // milliseconds between two renderings, of which one takes at most a quarter of the time

const list = $("messages");
const items = new WeakMap();  // of turns

// Show `turns` instead of those from `index` on.
export function showTurns(turns, index = 0) {
  while (list.children.length > index) list.lastElementChild.remove();
  list.append(...turns.map(itemOf));
  $("empty").hidden = list.children.length > 0;
}

// Screen readers read messages that are added, but not a chat that is opened.
export function showChat(chat) {
  list.setAttribute("aria-live", "off");
  showTurns(chat.turns);
  requestAnimationFrame(() => list.removeAttribute("aria-live"));
}

function itemOf(turn) {
  const item = element("li", "", turn.role), isUser = turn.role === "user";
  const content = element(isUser ? "p" : "div", "", "content"), actions = element("div", "", "actions");
  item.append(element("h2", isUser ? "You" : "Assistant"), content, actions);
  items.set(turn, item);
  if (isUser) {
    content.textContent = escapeInvisible(turn.content);
    actions.append(button("Edit", "plain last-only", "edit"));
    if (turn.content.length > 1200 || turn.content.split("\n").length > 12) fold(item, actions);
  } else {
    actions.append(button("Copy", "plain", "copy"), button("Regenerate", "plain last-only", "regenerate"));
    showText(turn);
    actions.before(...details(turn));
  }
  return item;
}

function showText(turn) {
  const item = items.get(turn), content = item.querySelector(".content");
  showMarkdown(content, turn.content);
  if (!turn.reasoning) return;
  if (!item.querySelector(".reasoning")) {
    const reasoning = element("details", "", "reasoning");
    reasoning.append(element("summary", "Reasoning"), element("p"));
    content.before(reasoning);
  }
  item.querySelector(".reasoning p").textContent = escapeInvisible(turn.reasoning);
}

// Return functions that show a growing answer: after each part of it, and once at its end.
export function growingAnswer(turn, onShow) {
  const item = items.get(turn);
  let timer = null, delay = LEAST_DELAY;
  const show = () => {
    const start = performance.now();
    showText(turn);
    onShow();
    timer = null;
    delay = Math.max(LEAST_DELAY, SHARE * (performance.now() - start));
  };
  item.classList.add("busy");
  return {
    grow: () => { timer ??= setTimeout(show, delay); },
    finish: () => {
      clearTimeout(timer);
      showText(turn);
      item.classList.remove("busy");
      item.querySelector(".actions").before(...details(turn));
    },
  };
}

function fold(item, actions) {
  const toggle = element("button", "", "plain");
  toggle.onclick = () => {
    const folded = item.classList.toggle("folded");
    toggle.textContent = folded ? "Show all" : "Show less";
    toggle.setAttribute("aria-expanded", !folded);
    if (folded) item.scrollIntoView({ block: "nearest" });
  };
  actions.prepend(toggle);
  toggle.click();
}

// Replace the text of a user's message by an input; `send` gets what the user makes of it.
export function editMessage(turn, send) {
  const item = items.get(turn), [content, actions] = [".content", ".actions"].map(name => item.querySelector(name));
  if (item.querySelector("form")) return;
  const form = element("form", "", "edit"), input = element("textarea"), buttons = element("div", "", "actions");
  const cancel = button("Cancel", "plain", "cancel");
  const close = () => {
    form.remove();
    content.hidden = actions.hidden = false;
    $("message").focus();
  };
  input.rows = 1;
  input.value = turn.content;
  input.setAttribute("aria-label", "Edit message");
  buttons.append(element("button", "Send", "main"), cancel);
  form.append(input, buttons);
  content.hidden = actions.hidden = true;
  content.before(form);
  fitHeight(input);
  input.focus();
  input.oninput = () => fitHeight(input);
  cancel.onclick = close;
  form.onkeydown = event => {
    if (event.key === "Escape") close();
    submitOnEnter(event);
  };
  form.onsubmit = event => {
    event.preventDefault();
    if (!input.value.trim()) return;
    close();
    send(input.value);
  };
}

export function submitOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.tagName !== "TEXTAREA") return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function details(turn) {
  const facts = factsOf(turn), { session } = turn;
  const nodes = facts.length ? [element("p", facts.join(", "), "facts")] : [];
  if (!session?.rescued) return nodes;
  const quotation = element("details"), quotes = element("ul", "", "quotes");
  for (const { start, stop, text } of session.quoted) {
    const quote = element("li", escapeInvisible(text));
    quote.prepend(element("small", `tokens ${formatNumber(start)} to ${formatNumber(stop)}`));
    quotes.append(quote);
  }
  quotation.append(element("summary", `Quoted: ${formatTokens(session.rescued)}`), quotes);
  return [...nodes, quotation];
}

function factsOf({ usage, session, finish, stopped, speed, firstToken }) {
  const facts = [];
  if (usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: { cached_tokens: cached } } = usage;
    facts.push(`prompt ${formatTokens(prompt)} (${formatPercent(cached / prompt)} cached)`, `generated ${formatNumber(usage.completion_tokens)}`);
  }
  if (speed) facts.push(`${speed.toFixed(1)} tokens/s`);
  if (firstToken) facts.push(`first token after ${firstToken.toFixed(firstToken < 10 ? 2 : 0)} s`);
  if (finish === "length") facts.push("stopped at max tokens");
  if (stopped) facts.push("stopped");
  if (session?.recalled) {
    const bySearch = session.recalled_by_search;
    facts.push(`recalled ${formatTokens(session.recalled)}${bySearch ? ` (${formatNumber(bySearch)} by search)` : ""} in ${formatNumber(session.recall_ms)} ms`);
    if (session.recall_partial) facts.push("partial: a recalled sentence is incomplete");
  }
  return facts;
}
