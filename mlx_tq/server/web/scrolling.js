// The end of the conversation stays in view, whatever grows or shrinks, until the user scrolls up.
import { $ } from "./elements.js";

const main = document.querySelector("main");
let following = true, lastTop = 0;

const isAtEnd = () => main.scrollHeight - main.scrollTop - main.clientHeight < 4;

function follow() {
  following ||= isAtEnd();
  if (following) main.scrollTop = main.scrollHeight;
  $("latest").hidden = following;
}

export function showEnd() {
  following = true;
  follow();
}

main.onscroll = () => {
  // A scroll down may be our own, and the end have moved on since.
  if (main.scrollTop < lastTop) following = false;
  lastTop = main.scrollTop;
  following ||= isAtEnd();
  $("latest").hidden = following;
};
$("messages").addEventListener("click", ({ target }) => {  // what the user opens stays in view
  if (target.closest("summary, button")) following = false;
});
$("latest").onclick = () => { showEnd(); $("message").focus(); };

const sizes = new ResizeObserver(follow);
for (const node of [main, $("messages")]) sizes.observe(node);
