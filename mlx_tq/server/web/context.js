// The context: how much of it a chat uses, how much of that was cached, and what the cache of a session holds.
import { $, element, formatNumber, formatPercent, formatSize, formatTokens } from "./elements.js";

export function showContext({ turns, memory }, contextLength) {
  const usage = turns.at(-1)?.usage;
  const { segments, facts } = memory ? ofSession(memory, usage) : ofPrompt(usage);
  const used = usage?.total_tokens ?? memory?.tokens ?? 0, total = Math.max(contextLength ?? 0, memory?.tokens ?? 0, used, 1);
  $("bar").replaceChildren(...segments.map(([name, count]) => {
    const segment = element("i", "", name);
    segment.style.width = `${count / total * 100}%`;
    return segment;
  }));
  const share = contextLength ? `${formatTokens(used)} of ${formatNumber(contextLength)} (${formatPercent(used / contextLength)})` : formatTokens(used);
  const parts = used ? [["", `Context: ${share}`], ...facts] : [];
  $("usage").replaceChildren(...parts.map(([name, text]) => element("span", text, name)));
  $("bar").setAttribute("aria-label", parts.map(([, text]) => text).join(", ") || "The context is empty");
}

const cachedOf = ({ total_tokens: total, prompt_tokens_details: { cached_tokens: cached } }) =>
  ({ cached, fact: `${formatNumber(cached)} cached (${formatPercent(cached / total)})` });

function ofPrompt(usage) {
  if (!usage) return { segments: [], facts: [] };
  const { cached, fact } = cachedOf(usage), added = usage.total_tokens - cached;
  return { segments: [["cached", cached], ["new", added]], facts: [["cached", fact], ["new", `${formatNumber(added)} new`]] };
}

function ofSession(memory, usage) {
  const { live, archived, dropped } = memory;
  const isCompressed = memory.tokens >= memory.compressed_from && memory.bytes !== memory.native_bytes;
  const facts = [["", usage && cachedOf(usage).fact], ["live", `${formatNumber(live)} live`], ["archived", archived && `${formatNumber(archived)} archived`],
    ["evicted", dropped && `${formatNumber(dropped)} dropped`], ["", memory.recalled && `${formatNumber(memory.recalled)} recalled`],
    ["", memory.rescued && `${formatNumber(memory.rescued)} quoted`],
    ["", formatSize(memory.bytes) + (isCompressed ? `, ${memory.native_dtype} cache ${formatSize(memory.native_bytes)}` : "")]];
  return { segments: [["live", live], ["archived", archived], ["evicted", dropped]], facts: facts.filter(([, text]) => text) };
}

export function showLayout({ plan, context_length: contextLength, rescue }) {
  const lines = [];
  if (plan) {
    for (const { count, key, value } of plan.layers) lines.push(`${formatNumber(count)} layers: keys ${key}, values ${value}`);
    if (plan.other_layers) lines.push(`${formatNumber(plan.other_layers)} layers uncompressed`);
    if (plan.uncompressed.length) lines.push(`${formatNumber(plan.uncompressed.length)} cache parts stay uncompressed: ${plan.uncompressed[0].reason}`);
    lines.push(`First ${formatNumber(plan.sinks)} and last ${formatNumber(plan.window)} tokens in ${plan.dtype}`);
    const { policy, budget, recall } = plan.eviction ?? {};
    lines.push(policy ? `Eviction: ${policy}, budget ${typeof budget === "number" ? formatTokens(budget) : `${budget} of the tokens`}` : "No eviction");
    if (recall) lines.push("Evicted tokens are archived and recalled when a message needs them");
    if (rescue) lines.push("Evicted text is searched and quoted when a message needs it");
  } else {
    lines.push("mlx-lm's own cache, uncompressed");
  }
  if (contextLength) lines.push(`Context window: ${formatTokens(contextLength)}`);
  $("layout").replaceChildren(...lines.map(line => element("li", line)));
}
