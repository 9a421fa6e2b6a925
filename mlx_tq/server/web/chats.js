// Chats, one entry of the browser's storage each. Other entries of that storage are left alone.
import { escapeInvisible } from "./elements.js";

const PREFIX = "mlx-tq-chat-";
const entries = new Map();  // id: title and time of the last change, of all chats
const unstored = new Map();  // id: a chat that the browser did not store; it is in this tab only

export function newChat() {
  const random = crypto.getRandomValues(new Uint8Array(16));  // also names a session on the server: nobody can guess it
  return { id: "page-" + Array.from(random, byte => byte.toString(16).padStart(2, "0")).join(""), turns: [], memory: null };
}

// Return a stored chat, or null if it is missing or malformed.
function readStored(id) {
  try {
    const chat = JSON.parse(localStorage.getItem(PREFIX + id));
    const isChat = chat.id === id && chat.turns.every(({ role, content }) => role && typeof content === "string");
    return isChat ? chat : null;
  } catch {
    return null;
  }
}

export const readChat = id => unstored.get(id) ?? readStored(id);

function titleOf({ turns }) {
  const line = turns[0].content.split("\n").find(text => text.trim()) ?? "";
  return escapeInvisible(line.trim().slice(0, 80)) || "Untitled";
}

function note(id, chat, changed = chat?.changed) {
  if (chat?.turns.length) entries.set(id, { id, title: titleOf(chat), changed });
  else entries.delete(id);
}

export function loadChats() {
  try {
    for (const key of Object.keys(localStorage)) if (key.startsWith(PREFIX)) noteChange(key);
  } catch {
    // It refuses all storage; storing a chat will say so.
  }
}

// Note that another tab changed an entry of the storage; return the id if that is a chat's.
export function noteChange(key) {
  if (!key?.startsWith(PREFIX)) return null;
  const id = key.slice(PREFIX.length);
  note(id, readChat(id));
  return id;
}

export const chatList = () => [...entries.values()].sort((a, b) => b.changed - a.changed);

// Store a chat; return the error if the browser does not. If another tab changed it, keep that version and store this
// chat under a new id.
export function storeChat(chat) {
  const stored = readStored(chat.id);
  if (stored && stored.changed !== chat.changed) chat.id = newChat().id;
  const changed = Date.now();
  let fault = null;
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify({ ...chat, changed }));
    chat.changed = changed;
    unstored.delete(chat.id);
  } catch (error) {
    fault = error;
    unstored.set(chat.id, chat);
  }
  note(chat.id, chat, changed);
  return fault;
}

export function deleteChat(id) {
  unstored.delete(id);
  entries.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It refuses all storage.
  }
  for (const chat of unstored.values()) storeChat(chat);  // there may be room now
}

export const hasUnstoredChats = () => unstored.size > 0;
