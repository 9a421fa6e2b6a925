// The settings, stored in this tab until it is closed, and their dialog.
import { $ } from "./elements.js";

const NAMES = ["system", "temperature", "max-tokens", "key"];

// What this tab keeps until it is closed; nothing where the browser refuses all storage.
const storage = (() => {
  try {
    return sessionStorage;
  } catch {
    return { getItem: () => null, setItem: () => {} };
  }
})();
export const readTab = name => JSON.parse(storage.getItem(name));
export const writeTab = (name, value) => storage.setItem(name, JSON.stringify(value));

export let settings = readTab("settings") ?? {};

export function openSettings(field) {
  for (const name of NAMES) $(name).value = settings[name] ?? "";
  $("settings").returnValue = "";
  if (!$("settings").open) $("settings").showModal();
  $(field).focus();
}

// Call `onChange` when the user has changed the settings.
export function onSettingsChange(onChange) {
  $("open-settings").onclick = () => openSettings("system");
  $("settings").onclose = () => {
    if ($("settings").returnValue === "done") {
      settings = Object.fromEntries(NAMES.map(name => [name, $(name).value.trim()]));
      writeTab("settings", settings);
      onChange();
    }
    $("message").focus();
  };
}
