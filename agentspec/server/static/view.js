// What the conversation looks like. Text of the model is only ever set as text, never as markup.

import { oneLine } from "./json.js";

export function element(tag, { text, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

export function userBubble(text) {
  return element("div", { className: "user", text });
}

// One answer on the page, filled as it comes.
export class TurnView {
  constructor() {
    this.node = element("article", { className: "assistant" });
    this.node.setAttribute("aria-label", "Answer");
    this.reasoning = null;
    this.content = null;
    this.calls = new Map(); // call id -> {node, shown}
    this.cost = element("p", { className: "cost waiting" });
    this.node.append(this.cost);
  }

  add(added, turn) {
    if (added.reasoning) this.#reasoningText().append(element("span", { text: added.reasoning }));
    if (added.content.trim() || (added.content && this.content)) {
      this.#fold();
      this.content ??= this.#insert(element("div", { className: "prose content" }));
      this.content.append(element("span", { text: added.content }));
    }
    for (const call of added.calls) this.#showCall(call);
    this.cost.replaceChildren(...liveFigures(turn));
  }

  finish(turn) {
    this.#fold();
    this.cost.classList.remove("waiting");
    this.cost.replaceChildren(...figures(turn));
    for (const call of turn.calls) this.calls.get(call.id).shown.textContent = pretty(call.function.arguments);
  }

  // Under its call: a result that the page made.
  showResult(call, result) {
    this.calls.get(call.id).node.append(element("div", { className: "result" }, element("pre", { text: pretty(result) })));
  }

  // Under each call a field for its result; resolves with the texts when they are sent.
  askResults(calls, proposals) {
    const fields = calls.map((call, index) => {
      const field = element("textarea", { rows: 3, value: proposals[index] ?? "", id: `result-${call.id}`, spellcheck: false });
      const label = element("label", { text: `Result of ${call.function.name}`, htmlFor: field.id });
      this.calls.get(call.id).node.append(element("div", { className: "result" }, label, field));
      return field;
    });
    const button = element("button", { className: "main results-send", type: "button", text: calls.length > 1 ? "Send results" : "Send result" });
    this.node.insertBefore(button, this.cost);
    fields[0].focus();
    const sent = new Promise((resolve) => {
      button.addEventListener("click", () => {
        for (const field of fields) field.replaceWith(element("pre", { text: field.value }));
        button.remove();
        resolve(fields.map((field) => field.value));
      });
    });
    return { sent, close: () => { button.remove(); for (const field of fields) field.disabled = true; } };
  }

  #reasoningText() {
    if (!this.reasoning) {
      this.reasoning = element("details", { className: "reasoning", open: true }, element("summary", { text: "Reasoning" }), element("div", { className: "prose" }));
      this.#insert(this.reasoning);
    }
    return this.reasoning.lastChild;
  }

  #fold() {
    if (this.reasoning && !this.folded) this.reasoning.open = false;
    this.folded = Boolean(this.reasoning); // once: a reader who opens it again may read on
  }

  #showCall(call) {
    this.#fold();
    if (!this.calls.has(call.id)) {
      const title = element("p", { text: "calls " }, element("code", { text: call.function.name }));
      const shown = element("pre");
      this.calls.set(call.id, { node: this.#insert(element("div", { className: "call" }, title, shown)), shown });
    }
    this.calls.get(call.id).shown.textContent = call.function.arguments;
  }

  #insert(node) {
    this.node.insertBefore(node, this.cost);
    return node;
  }
}

function pretty(json) {
  try {
    return oneLine(JSON.parse(json));
  } catch {
    return json;
  }
}

function figure(value, name) {
  return element("span", {}, element("strong", { text: value }), ` ${name}`);
}

function liveFigures(turn) {
  if (turn.firstToken === null) return [];
  return [
    figure(milliseconds(turn.firstToken), "to the first token"),
    figure(String(turn.tokens), "tokens"),
    figure((turn.tokens / turn.steps).toFixed(2), "a step"),
  ];
}

function figures(turn) {
  const shown = turn.firstToken === null ? [] : [figure(milliseconds(turn.firstToken), "to the first token")];
  if (turn.usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: details, completion_tokens: completion } = turn.usage;
    shown.push(figure(String(completion), `tokens in ${(turn.lasted / 1000).toFixed(2)} s`));
    if (turn.speculation.mean_acceptance_length !== null) shown.push(figure(turn.speculation.mean_acceptance_length.toFixed(2), "tokens a step"));
    shown.push(figure(`${details.cached_tokens} of ${prompt}`, "prompt tokens cached"));
    if (turn.speculation.draft_acceptance_rate !== null) shown.push(acceptance(turn.speculation));
  }
  const cut = { length: "cut by the token limit", abort: "aborted", stopped: "stopped by you" }[turn.finishReason];
  if (cut) shown.push(element("span", { className: "cut", text: cut }));
  return shown;
}

function acceptance(speculation) {
  const shares = speculation.acceptance_by_position;
  const bars = element("span", { className: "bars" }, ...shares.map((share) => {
    const bar = element("i");
    bar.style.height = percent(share ?? 0);
    return bar;
  }));
  bars.setAttribute("aria-hidden", "true"); // the numbers behind them say the same
  const shown = figure(percent(speculation.draft_acceptance_rate), "of drafts accepted");
  if (shares.length) shown.append(", from a step's first to its last: ", bars, ` ${shares.map((share) => percent(share ?? 0)).join(", ")}`);
  return shown;
}

export function sessionFigures(totals) {
  const rows = [
    ["Turns", String(totals.turns)],
    ["Prompt cached", totals.prompt ? percent(totals.cached / totals.prompt) : "–"],
    ["Tokens a step", totals.steps ? (totals.completion / totals.steps).toFixed(2) : "–"],
    ["Drafts accepted", totals.drafted ? percent(totals.accepted / totals.drafted) : "–"],
  ];
  return rows.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

function milliseconds(value) {
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}
