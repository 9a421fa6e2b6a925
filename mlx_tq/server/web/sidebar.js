// The list of chats: next to the conversation, or over it in a narrow window.
import { $, element } from "./elements.js";
import { chatList } from "./chats.js";

const narrow = matchMedia("(max-width: 52rem)");

export function showChats(currentId, isBusy) {
  $("chats").replaceChildren(...chatList().map(({ id, title }) => {
    const item = element("li"), open = element("button", title, "title"), remove = element("button", "\u00d7", "remove");
    open.title = title;
    if (id === currentId) open.setAttribute("aria-current", "true");
    remove.setAttribute("aria-label", `Delete ${title}`);
    open.disabled = remove.disabled = isBusy;
    for (const node of [open, remove]) node.dataset.id = id;
    item.append(open, remove);
    return item;
  }));
  $("new-chat").disabled = isBusy;
}

export function toggleSidebar(isOpen) {
  $("sidebar").classList.toggle("open", isOpen);
  $("open-sidebar").setAttribute("aria-expanded", isOpen);
  $("chat").inert = isOpen && narrow.matches;
  if (isOpen) $("new-chat").focus();
}

export const isSidebarOpen = () => $("sidebar").classList.contains("open");

// Call `open` or `remove` with the id of the chat that the user chooses; an id of null is a new chat.
export function onSidebarChoice(open, remove) {
  $("open-sidebar").onclick = () => toggleSidebar(true);
  $("new-chat").onclick = () => open(null);
  $("chats").onclick = ({ target }) => {
    const { id } = target.dataset;
    if (target.matches(".title")) open(id);
    else if (target.matches(".remove")) remove(id, target.previousElementSibling.title);
  };
  document.addEventListener("click", ({ target }) => {
    if (isSidebarOpen() && !target.closest("#sidebar, #open-sidebar, dialog")) toggleSidebar(false);
  });
  narrow.onchange = () => toggleSidebar(false);
}
