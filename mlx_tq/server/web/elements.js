// Elements and texts that several parts of the page use.
export const $ = id => document.getElementById(id);

export const formatNumber = n => n.toLocaleString("en");
export const formatTokens = n => `${formatNumber(n)} ${n === 1 ? "token" : "tokens"}`;
export const formatPercent = share => `${share > 0 && share < .01 ? "<1" : Math.floor(100 * share)}%`;
export const formatSize = bytes => bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB`
  : bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;

// Untrusted text is only ever set as text: nothing in it can become an element.
export function element(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

export function button(text, className, action) {
  const node = element("button", text, className);
  node.type = "button";
  node.dataset.action = action;
  return node;
}

// Invisible characters, and those that change the text direction, are shown as code points.
const INVISIBLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u{e0000}-\u{e007f}]/gu;
export const escapeInvisible = text => text.replace(INVISIBLE, c => `[U+${c.codePointAt().toString(16).toUpperCase().padStart(4, "0")}]`);

// A text input grows with its text.
export function fitHeight(input) {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}
