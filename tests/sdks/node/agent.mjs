// The AI SDK: generateText or streamText with the tools. Arguments: URL, `whole` or `streamed`, variant (the provider).
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, mode, way] = process.argv.slice(2);
const { model, questions, schemas, results } = JSON.parse(process.env.CLIENT_TASK);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  openai: () => createOpenAI(settings)(model),
  "openai.chat": () => createOpenAI(settings).chat(model),
  "openai-compatible": () => createOpenAICompatible({ ...settings, name: "local", includeUsage: true })(model),
  anthropic: () => createAnthropic(settings)(model),
};

const calls = [];
const tools = Object.fromEntries(
  Object.entries(schemas).map(([name, schema]) => [
    name,
    tool({
      description: name,
      inputSchema: jsonSchema(schema),
      execute: async (input) => {
        calls.push([name, input]);
        return results[name];
      },
    }),
  ]),
);

const messages = [];
const answers = [];
const cached = [];
for (const question of questions) {
  messages.push({ role: "user", content: question });
  const asked = { model: models[way](), messages, tools, stopWhen: stepCountIs(5), maxRetries: 0 };
  const result = mode === "streamed" ? streamText({ ...asked, onError: ({ error }) => { throw error; } }) : await generateText(asked);
  answers.push(await result.text);
  cached.push(...(await result.steps).map((step) => step.usage.inputTokenDetails.cacheReadTokens ?? 0));
  messages.push(...(await result.response).messages);
}
console.log("\n" + JSON.stringify({ calls, answers, cached }));
