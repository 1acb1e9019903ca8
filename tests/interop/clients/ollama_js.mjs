// Ollama's npm package against a scripted server, whole and streamed.
//
//     node ollama_js.mjs ROOT KEY PACKAGES
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import assert from 'node:assert/strict'

const [root, key, packages] = process.argv.slice(2)
// The packages lie elsewhere than this file.
const required = createRequire(pathToFileURL(packages + '/'))
const { Ollama } = await import(pathToFileURL(required.resolve('ollama')).href)

const WEATHER = { Rome: 'sunny in Rome', Paris: 'rainy in Paris' }
const city = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'Weather of a city.', parameters: city } }]
const ollama = new Ollama({ host: root, headers: { Authorization: `Bearer ${key}` } })

const one = async (messages, stream) => {
  const answer = await ollama.chat({ model: 'm', messages, tools, stream })
  if (!stream) return answer.message
  const message = { role: 'assistant', content: '', tool_calls: [] }
  for await (const part of answer) {
    message.content += part.message.content ?? ''
    message.tool_calls.push(...(part.message.tool_calls ?? []))
  }
  return message
}
for (const stream of [false, true]) {
  const messages = [{ role: 'user', content: 'Weather in Rome and Paris?' }]
  const called = await one(messages, stream)
  messages.push(called)
  const asked = called.tool_calls.map(call => call.function.arguments.city)
  assert.deepEqual(asked, ['Rome', 'Paris'], `stream=${stream}`)
  for (const city of asked) messages.push({ role: 'tool', tool_name: 'get_weather', content: WEATHER[city] })
  assert.equal((await one(messages, stream)).content, 'Rome is sunny, Paris is rainy.', `stream=${stream}`)
}
const text = await ollama.generate({ model: 'm', prompt: 'Hi' })
assert.equal(text.response, 'Hello there.', 'generate')
assert.equal((await ollama.list()).models[0].name.split(':')[0], 'm', 'list')
