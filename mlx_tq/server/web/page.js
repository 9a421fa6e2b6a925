// The chat page: sends messages and shows their answers.
import { deleteChat, hasUnstoredChats, loadChats, newChat, noteChange, readChat, storeChat } from "./chats.js";
import { showContext, showLayout } from "./context.js";
import { editMessage, growingAnswer, showChat, showTurns, submitOnEnter } from "./conversation.js";
import { $, escapeInvisible, fitHeight, formatNumber } from "./elements.js";
import { showEnd } from "./scrolling.js";
import { answerEvents, dropSession, fetchPlan } from "./server.js";
import { onSettingsChange, openSettings, readTab, writeTab } from "./settings.js";
import { isSidebarOpen, onSidebarChoice, showChats, toggleSidebar } from "./sidebar.js";

let chat = newChat(), plan = null;
let running = null;  // the AbortController of the current request

// Without eviction and quotations, stored prompts do what a session does, and also serve an edited conversation.
const usesSession = () => plan?.sessions > 0 && Boolean(plan.plan?.eviction || plan.rescue);

async function connect() {
  try {
    plan = await fetchPlan();
    $("model").textContent = escapeInvisible(plan.model);
    $("temperature").placeholder = plan.temperature;
    $("max-tokens").placeholder = plan.max_tokens ?? "no limit";
    showLayout(plan);
    showContext(chat, plan.context_length);
    showError("");
  } catch (error) {
    showError(error.message);
    if (error.status !== 401) return;
    $("model").textContent = "";
    openSettings("key");
  }
}

// Generation

// Send a message as the turn `index`; later turns are dropped once an answer has begun.
async function send(text, index = chat.turns.length) {
  const replaced = chat.turns.splice(index);
  const answer = { role: "assistant", content: "" };
  chat.turns.push({ role: "user", content: text }, answer);
  showTurns(chat.turns.slice(index), index);
  showError("");
  setBusy(true);
  showEnd();
  let fault = "";
  const started = performance.now();
  const view = growingAnswer(answer, () => showSpeed(answer, started));
  try {
    await generate(answer, started, view.grow);
  } catch (error) {
    answer.stopped = true;
    if (error.name !== "AbortError") fault = error.message;
    if (error.status === 401) openSettings("key");
  }
  view.finish();
  if (isEmpty(answer)) {  // restore the previous turns and put the message back into the input
    chat.turns.splice(index, 2, ...replaced);
    showTurns(replaced, index);
    if (replaced[0]?.content !== text) returnToInput(text);
  }
  setBusy(false);
  announce(fault ? "" : answer.stopped ? "Stopped" : "Answer complete");
  showError(fault);
  showContext(chat, plan?.context_length);
  save();
}

const isEmpty = turn => turn.stopped && !turn.content && !turn.reasoning;

async function generate(answer, started, grow) {
  const options = { session: usesSession() && chat.id, signal: running.signal, onPrefill: showPrefill };
  let lastPart = started;
  if (!options.session) chat.memory = null;
  for await (const event of answerEvents(chat.turns.slice(0, -1), options)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices, { content = "", reasoning = "" } = choice?.delta ?? {};
    if (content || reasoning) {
      lastPart = performance.now();
      if (!answer.firstToken) announce("Generating");
      answer.firstToken ??= (lastPart - started) / 1000;
      answer.parts = (answer.parts ?? 0) + 1;
      answer.content += content;
      if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
      grow();
    }
    if (choice?.finish_reason) answer.finish = choice.finish_reason;
    if (event.usage) {
      answer.usage = event.usage;
      const seconds = (lastPart - started) / 1000 - answer.firstToken;
      if (seconds > 0) answer.speed = (event.usage.completion_tokens - 1) / seconds;
    }
    if (event.session) {
      const { recalled, recalled_by_search, recall_partial, recall_ms, rescued, quoted } = event.session;
      answer.session = { recalled, recalled_by_search, recall_partial, recall_ms, rescued, quoted };
      chat.memory = event.session;
    }
  }
}

// Status line

function setBusy(busy) {
  running = busy ? new AbortController() : null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("messages").setAttribute("aria-busy", busy);  // screen readers read the complete answer, not each token
  $("prefill").hidden = true;
  $("activity-text").textContent = busy ? "Waiting" : "";
  showChats(chat.id, busy);
}

function showPrefill(done, total) {
  const share = Math.floor(100 * done / total);
  $("prefill").hidden = false;
  $("prefill").value = share;
  $("activity-text").textContent = `Prefill ${share}% of ${formatNumber(total)} tokens`;
}

function showSpeed({ firstToken, parts }, started) {
  const seconds = (performance.now() - started) / 1000 - firstToken;
  $("prefill").hidden = true;
  $("activity-text").textContent = seconds > .5 ? `Generating, ${((parts - 1) / seconds).toFixed(1)} tokens/s` : "Generating";
}

function announce(text) {
  $("status").textContent = text;
}

function showError(text) {
  $("error").textContent = escapeInvisible(text);
}

// Chats

function save() {
  const fault = chat.turns.length ? storeChat(chat) : null;
  const isFull = fault?.name === "QuotaExceededError";
  const why = isFull ? "its storage for this page is full. Delete other chats to make room" : "it refuses to store anything for this page";
  $("unsaved").textContent = fault ? `The browser cannot keep this chat: ${why}. This chat is lost when you close the tab.` : "";
  writeTab("chat", chat.id);
  showChats(chat.id, Boolean(running));
}

function open(opened) {
  chat = opened;
  writeTab("chat", chat.id);
  if (chat.turns.length && isEmpty(chat.turns.at(-1))) returnToInput(chat.turns.splice(-2)[0].content);
  showChat(chat);
  showChats(chat.id, Boolean(running));
  showContext(chat, plan?.context_length);
  showError("");
  showEnd();
}

function returnToInput(text) {
  $("message").value = [text, $("message").value].filter(Boolean).join("\n");
  fitHeight($("message"));
}

function confirmDeletion(id, title) {
  $("confirm-text").textContent = `Delete the chat \u201c${title}\u201d?`;
  $("confirm").returnValue = "cancel";
  $("confirm").showModal();
  $("confirm").onclose = () => {
    if ($("confirm").returnValue === "delete") {
      if (usesSession()) dropSession(id);
      deleteChat(id);
      if (id === chat.id) open(newChat());
      save();
    }
    (isSidebarOpen() ? $("new-chat") : $("message")).focus();
  };
}

// Copying

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // pages that are not on localhost or https have no clipboard
    const input = document.createElement("textarea");
    input.value = text;
    button.after(input);
    input.select();
    document.execCommand("copy");
    input.remove();
    button.focus();
  }
  button.textContent = "Copied";
  announce("Copied");
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// Events

$("messages").addEventListener("click", ({ target }) => {
  const item = target.closest("#messages > li"), index = [...$("messages").children].indexOf(item), turn = chat.turns[index];
  const actions = {
    "copy": () => copy(target, escapeInvisible(turn.content)),
    "copy-code": () => copy(target, target.closest(".code").querySelector("pre").textContent),
    "edit": () => editMessage(turn, text => send(text, index)),
    "regenerate": () => send(chat.turns[index - 1].content, index - 1),
  };
  if (!running || target.dataset.action?.startsWith("copy")) actions[target.dataset.action]?.();
});
$("message").oninput = () => fitHeight($("message"));
$("message").onkeydown = submitOnEnter;
$("composer").onsubmit = event => {
  event.preventDefault();
  const text = $("message").value;
  if (running || !text.trim()) return;
  $("message").value = "";
  fitHeight($("message"));
  send(text);
};
$("stop").onclick = () => { running?.abort(); $("message").focus(); };
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (isSidebarOpen()) {
    toggleSidebar(false);
    $("open-sidebar").focus();
  } else {
    running?.abort();
  }
});
onSettingsChange(connect);
onSidebarChoice(id => {
  toggleSidebar(false);
  const chosen = id === null ? newChat() : readChat(id);
  if (chosen) open(chosen);
  $("message").focus();
}, confirmDeletion);
addEventListener("storage", event => {
  const id = noteChange(event.key), changed = id === chat.id && !running && readChat(id);
  if (changed) open(changed);
  else showChats(chat.id, Boolean(running));
});
addEventListener("pagehide", () => {  // what was written is kept
  if (running) {
    const [question, answer] = chat.turns.slice(-2);
    answer.stopped = true;
    if (isEmpty(answer)) returnToInput(question.content);
    else storeChat(chat);
  }
  writeTab("draft", $("message").value);
});
addEventListener("beforeunload", event => {
  if (hasUnstoredChats()) event.preventDefault();
});

loadChats();
returnToInput(readTab("draft") ?? "");
open(readChat(readTab("chat")) ?? chat);
connect();
