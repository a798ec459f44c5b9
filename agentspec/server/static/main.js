// The page's conduct: settings in, a conversation of turns and tool results out.

import { chat, servedModel } from "./api.js";
import { DemoTools, SUGGESTIONS, TOOLS } from "./demo_tools.js";
import { Totals, Turn } from "./turn.js";
import { TurnView, element, sessionFigures, userBubble } from "./view.js";

const MAX_ROUNDS = 16; // turns in a row that the page answers by itself
const THEMES = [["Auto", "as the system has them"], ["Light", "light"], ["Dark", "dark"]];

const at = (id) => document.getElementById(id);

let model = null;
let conversation = null;

// Everything that a new chat begins anew.
class Conversation {
  constructor() {
    this.messages = [];
    this.session = newSession();
    this.demo = new DemoTools();
    this.totals = new Totals();
    this.abort = null;
    this.open = null; // fields that wait for results
  }
}

function newSession() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is missing where the page came over plain HTTP
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function startOver() {
  conversation?.abort?.abort();
  conversation?.open?.close();
  conversation = new Conversation();
  at("log").replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  tell(null);
  setBusy(false);
  showTotals();
  at("message").focus();
}

async function connect() {
  try {
    model = await servedModel(key());
    at("model").textContent = model;
    document.title = `${model} · agentspec`;
    tell(null);
  } catch (error) {
    model = null;
    tell(error.status === 401 ? "The server wants an API key: type it under Access." : `The server does not answer: ${error.message}`);
    if (error.status === 401) at("api-key").closest("details").open = true;
  }
}

async function ask(text) {
  if (model === null) await connect();
  const tools = definedTools();
  if (model === null || tools === null) return;
  at("message").value = "";
  at("welcome").hidden = true;
  conversation.messages.push({ role: "user", content: text });
  show(userBubble(text));
  await answer(conversation, tools);
}

// Turns until one asks for nothing more. What belongs to a conversation that was left behind is dropped.
async function answer(own, tools) {
  setBusy(true);
  tell(null);
  try {
    for (let round = 0; round < MAX_ROUNDS; round += 1) {
      const { turn, view } = await oneTurn(own, tools);
      if (own !== conversation) return;
      own.messages.push(turn.message());
      if (!turn.wantsResults) return announce(turn.finishReason === "stop" ? "The answer is complete." : "The answer was cut.");
      const results = await toolResults(own, turn, view);
      if (own !== conversation || results === null) return;
      turn.calls.forEach((call, index) => own.messages.push({ role: "tool", tool_call_id: call.id, content: results[index] }));
    }
    tell(`The model called tools in ${MAX_ROUNDS} turns on end; the page leaves it at that.`);
  } catch (error) {
    if (own === conversation) tell(error.message, () => answer(own, tools));
  } finally {
    if (own === conversation) setBusy(false);
  }
}

async function oneTurn(own, tools) {
  const turn = new Turn();
  const view = new TurnView();
  show(view.node);
  announce("The model answers.");
  own.abort = new AbortController();
  try {
    for await (const chunk of chat(requestBody(own, tools), { key: key(), session: own.session, signal: own.abort.signal })) {
      view.add(turn.push(chunk), turn);
      if (turn.speculation?.forced) at("forced").hidden = false;
      follow();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (turn.tokens) view.finish(turn);
      else view.node.remove();
      throw error;
    }
    turn.finishReason = "stopped";
  }
  view.finish(turn);
  own.totals.add(turn);
  if (own === conversation) showTotals();
  follow();
  return { turn, view };
}

function requestBody(own, tools) {
  const system = at("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...own.messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // chunks then say how many tokens there are so far
    temperature: at("temperature").valueAsNumber,
    max_completion_tokens: at("max-tokens").valueAsNumber,
    chat_template_kwargs: { enable_thinking: at("thinking").checked },
  };
  if (tools.length) body.tools = tools;
  return body;
}

// Results of a turn's calls in their order; null when the chat was left or stopped while it waited for them.
async function toolResults(own, turn, view) {
  const made = turn.calls.map((call) => own.demo.run(call.function.name, call.function.arguments));
  const mine = (index) => at("automatic").checked && made[index] !== null;
  const typed = turn.calls.filter((_, index) => !mine(index));
  turn.calls.forEach((call, index) => mine(index) && view.showResult(call, made[index]));
  follow();
  if (!typed.length) return made;
  announce(`The model calls ${typed.map((call) => call.function.name).join(", ")}: type the result.`);
  own.open = view.askResults(typed, typed.map((call) => made[turn.calls.indexOf(call)]));
  own.abort = new AbortController();
  const stopped = new Promise((resolve) => own.abort.signal.addEventListener("abort", () => resolve(null)));
  follow();
  const answers = await Promise.race([own.open.sent, stopped]);
  if (answers === null) {
    own.open.close();
    own.messages.pop(); // a call without a result can't be sent back
    return null;
  }
  own.open = null;
  return turn.calls.map((call, index) => (typed.includes(call) ? answers[typed.indexOf(call)] : made[index]));
}

function definedTools() {
  try {
    const tools = JSON.parse(at("tools").value || "[]");
    if (!Array.isArray(tools)) throw new Error("must be a list");
    at("tools-problem").hidden = true;
    return tools;
  } catch (error) {
    at("tools-problem").hidden = false;
    at("tools-problem").textContent = `Not a list of tools in JSON: ${error.message}`;
    tell("The tool definitions are not valid: see Tools, Definitions.");
    return null;
  }
}

function key() {
  return at("api-key").value;
}

function show(node) {
  at("log").append(node);
  at("log").scrollTop = at("log").scrollHeight;
}

// Keeps the end in sight, unless the reader has scrolled up.
function follow() {
  const log = at("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function setBusy(busy) {
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  at("log").setAttribute("aria-busy", String(busy));
  if (!busy) at("message").focus();
}

function showTotals() {
  at("session").replaceChildren(...sessionFigures(conversation.totals));
}

function announce(text) {
  at("announcer").textContent = text;
}

// Shows what went wrong, with a way to try it again if there is one; null: nothing did.
function tell(text, again = null) {
  at("notice").hidden = text === null;
  at("notice").textContent = text ?? "";
  if (again === null) return;
  const button = element("button", { type: "button", text: "Try again" });
  button.addEventListener("click", again);
  at("notice").append(" ", button);
}

function setTheme(index) {
  const [name, described] = THEMES[index];
  if (index) document.documentElement.dataset.theme = name.toLowerCase();
  else delete document.documentElement.dataset.theme;
  at("theme").textContent = name;
  at("theme").setAttribute("aria-label", `Colours: ${described}`);
  localStorage.setItem("theme", String(index));
}

function resetTools() {
  at("tools").value = JSON.stringify(TOOLS, null, 1);
  at("tools-problem").hidden = true;
}

function submit() {
  const text = at("message").value.trim();
  if (text && !at("send").hidden) ask(text);
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
at("stop").addEventListener("click", () => conversation.abort?.abort());
at("new-chat").addEventListener("click", startOver);
at("reset-tools").addEventListener("click", resetTools);
at("theme").addEventListener("click", () => setTheme((Number(localStorage.getItem("theme")) + 1) % THEMES.length));
at("marks").addEventListener("change", () => at("log").classList.toggle("marked", at("marks").checked));
at("api-key").addEventListener("change", () => {
  sessionStorage.setItem("api-key", key());
  connect();
});

at("api-key").value = sessionStorage.getItem("api-key") ?? "";
at("suggestions").append(...SUGGESTIONS.map((text) => {
  const button = element("button", { type: "button", text });
  button.addEventListener("click", () => ask(text));
  return element("li", {}, button);
}));
setTheme(Number(localStorage.getItem("theme")) % THEMES.length);
resetTools();
startOver();
connect();
