// Requests to the server, and the events of its answers.
import { settings } from "./settings.js";

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(settings.key && { Authorization: `Bearer ${settings.key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("Cannot reach the server. Is it running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? response.statusText);
  error.status = response.status;
  throw error;
}

export const fetchPlan = async () => (await request("/v1/plan")).json();

export function dropSession(name) {
  request(`/v1/sessions/${name}`, { method: "DELETE" }).catch(() => {});  // not worth waiting for
}

// Yield the events of an answer to `turns`; `onPrefill` gets the prompt tokens that are prefilled, and their total.
export async function* answerEvents(turns, { session, signal, onPrefill }) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = turns.map(({ role, content }) => ({ role, content }));
  const body = { messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  if (settings.temperature) body.temperature = +settings.temperature;
  if (settings["max-tokens"]) body.max_tokens = +settings["max-tokens"];
  const headers = { "Content-Type": "application/json", ...(session && { "X-MLX-TQ-Session": session }) };
  const response = await request("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(error => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Error("The server closed the connection before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const prefill = part.match(/^: prefill (\d+) of (\d+)/);
      if (prefill) onPrefill(+prefill[1], +prefill[2]);
      else if (part === "data: [DONE]") return;
      else if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}
