// One answer as it comes: what was said, which calls were made, and what it cost. Knows chunks, and nothing of the page or of HTTP.

export class Turn {
  constructor(now = performance.now()) {
    this.reasoning = "";
    this.content = "";
    this.calls = [];
    this.finishReason = null;
    this.usage = null;
    this.speculation = null;
    this.tokens = 0;
    this.steps = 0;
    this.started = now;
    this.firstToken = null; // milliseconds
    this.lasted = 0; // milliseconds
  }

  // Takes one chunk in and returns what it added: {reasoning, content, calls} with the texts, and the calls that changed.
  push(chunk, now = performance.now()) {
    const choice = chunk.choices[0];
    if (!choice && chunk.usage) this.usage = chunk.usage;
    if (chunk.metrics) this.speculation = chunk.metrics.speculative_decoding;
    this.lasted = now - this.started;
    const added = { reasoning: "", content: "", calls: [] };
    if (!choice) return added;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (chunk.usage) this.#count(chunk.usage.completion_tokens);
    const delta = choice.delta;
    added.reasoning = delta.reasoning_content ?? "";
    added.content = delta.content ?? "";
    this.reasoning += added.reasoning;
    this.content += added.content;
    for (const part of delta.tool_calls ?? []) added.calls.push(this.#extend(part));
    return added;
  }

  // Every call is whole, and waits for its result.
  get wantsResults() {
    return this.finishReason === "tool_calls";
  }

  // The message to send back. Calls of a turn that was cut have no results, so they are left out.
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.wantsResults) message.tool_calls = this.calls;
    return message;
  }

  // Tokens so far. Each step of the engine is one chunk.
  #count(tokens) {
    if (tokens === this.tokens) return;
    this.firstToken ??= this.lasted;
    this.tokens = tokens;
    this.steps += 1;
  }

  #extend(part) {
    if (part.id) {
      this.calls[part.index] = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
    }
    const call = this.calls[part.index];
    call.function.arguments += part.function.arguments ?? "";
    return call;
  }
}

// Sums over the turns of a session.
export class Totals {
  constructor() {
    Object.assign(this, { turns: 0, prompt: 0, cached: 0, completion: 0, steps: 0, drafted: 0, accepted: 0 });
  }

  add(turn) {
    if (!turn.usage) return;
    this.turns += 1;
    this.prompt += turn.usage.prompt_tokens;
    this.cached += turn.usage.prompt_tokens_details.cached_tokens;
    this.completion += turn.usage.completion_tokens;
    this.steps += turn.speculation.num_spec_steps;
    this.drafted += turn.speculation.num_draft_tokens;
    this.accepted += turn.speculation.num_accepted_draft_tokens;
  }
}
