// The settings, stored in this tab until it is closed, and their dialog.
import { $ } from "./elements.js";

const NAMES = ["system", "temperature", "max-tokens", "key"];

export let settings = JSON.parse(sessionStorage.getItem("settings")) ?? {};

export function openSettings(field) {
  for (const name of NAMES) $(name).value = settings[name] ?? "";
  $("settings").returnValue = "";
  if (!$("settings").open) $("settings").showModal();
  $(field).focus();
}

// Call `onChange` when the user has changed the settings.
export function watchSettings(onChange) {
  $("open-settings").onclick = () => openSettings("system");
  $("settings").onclose = () => {
    if ($("settings").returnValue === "done") {
      settings = Object.fromEntries(NAMES.map(name => [name, $(name).value.trim()]));
      sessionStorage.setItem("settings", JSON.stringify(settings));
      onChange();
    }
    $("message").focus();
  };
}
