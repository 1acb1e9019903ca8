// The Vercel AI SDK against a scripted server: four providers, whole and streamed.
//
//     node ai_sdk.mjs URL KEY, where the packages lie in NODE_PATH's folder
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import assert from 'node:assert/strict'

const [url, key, packages] = process.argv.slice(2)
// The packages lie elsewhere than this file.
const required = createRequire(pathToFileURL(packages + '/'))
const load = name => import(pathToFileURL(required.resolve(name)).href)
const { generateText, streamText, Output, tool, stepCountIs } = await load('ai')
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')
const { createOpenAI } = await load('@ai-sdk/openai')
const { createAnthropic } = await load('@ai-sdk/anthropic')
const { z } = await load('zod')

const QUESTION = 'Weather in Rome and Paris?'
const ANSWER = 'Rome is sunny, Paris is rainy.'
const WEATHER = { Rome: 'sunny in Rome', Paris: 'rainy in Paris' }
let asked = []
const take = () => { const sorted = asked.sort(); asked = []; return sorted }
const get_weather = tool({
  description: 'Weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    asked.push(city)
    if (!WEATHER[city]) throw new Error('there is no such city')
    return WEATHER[city]
  },
})
globalThis.AI_SDK_LOG_WARNINGS = false
const openai = createOpenAI({ baseURL: url, apiKey: key })
const compatible = createOpenAICompatible({ name: 'local', baseURL: url, apiKey: key, includeUsage: true })
const models = {
  'openai-compatible': compatible('m'),
  'openai chat': openai.chat('m'),
  'openai responses': openai('m'),
  anthropic: createAnthropic({ baseURL: url, apiKey: key })('m'),
}
for (const [name, model] of Object.entries(models)) {
  const asking = { model, tools: { get_weather }, stopWhen: stepCountIs(5), maxRetries: 0 }
  const whole = await generateText({ ...asking, prompt: QUESTION })
  assert.deepEqual([take(), whole.text], [['Paris', 'Rome'], ANSWER], `${name}: whole`)
  assert.ok(whole.totalUsage.totalTokens > 10, `${name}: usage`)
  const stream = streamText({ ...asking, prompt: QUESTION, onError({ error }) { throw error } })
  let last = ''
  for await (const part of stream.fullStream) {
    if (part.type === 'start-step') last = ''
    if (part.type === 'text-delta') last += part.text
    assert.notEqual(part.type, 'error', `${name}: ${part.error}`)
  }
  assert.deepEqual([take(), last], [['Paris', 'Rome'], ANSWER], `${name}: streamed`)
  // The first turn goes back with its thought and its calls.
  const messages = [{ role: 'user', content: QUESTION }, ...(await stream.response).messages, { role: 'user', content: 'Thanks for both.' }]
  const later = await generateText({ ...asking, messages })
  assert.equal(later.text, 'You are welcome.', `${name}: a further turn with the history`)
  const failed = await generateText({ ...asking, prompt: 'Weather in Atlantis?' })
  assert.deepEqual([take(), failed.text], [['Atlantis'], 'No city has that name.'], `${name}: a tool that fails`)
  const schema = z.object({ city: z.string(), degrees: z.number().int() })
  const object = await generateText({ model, output: Output.object({ schema }), prompt: 'It is 21 degrees in Rome, as JSON.', maxRetries: 0 })
  assert.deepEqual(object.output, { city: 'Rome', degrees: 21 }, `${name}: structured output`)
}
