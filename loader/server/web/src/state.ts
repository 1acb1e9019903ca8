// What the page knows, and what it does: one store that components listen to.
import { useEffect, useState } from "preact/hooks";
import { ask, events, get, hasKey, Refused, whenKeyIsRefused } from "./api";
import { take } from "./figures";
import * as store from "./store";
import type { Chat, Message } from "./store";
import { t } from "./strings";

/** Something that happened to the server or a model, as `/events` tells it. */
export type Happening = { number: number; time: string; kind: string; model: string | null; text: string; fields: any };
export const state = {
    chats: [] as Chat[], chat: store.newChat(), stats: null as any, props: null as any, models: [] as any[], offline: false,
    events: [] as Happening[], lastEvent: -1, news: null as { text: string; isBad: boolean; at: number } | null, needsKey: false, keyWrong: false, stored: true, busyModels: {} as Record<string, string>, modelErrors: {} as Record<string, string>,
};
const listeners = new Set<() => void>();
let frame = 0;
/** Tells components, once a frame at most. */
export function changed() { frame ||= requestAnimationFrame(() => { frame = 0; for (const listener of listeners) listener(); }); }
export function useStore() {
    const [, set] = useState(0);
    useEffect(() => { const listener = () => set((n) => n + 1); listeners.add(listener); return () => { listeners.delete(listener); }; }, []);
    return state;
}
const running = new Map<string, AbortController>();
export const isRunning = (chat: Chat) => running.has(chat.id);
export const stop = (chat: Chat) => running.get(chat.id)?.abort();

export function keep(chat: Chat) {
    if (!state.chats.includes(chat)) state.chats.unshift(chat);
    if (chat === state.chat) remember(chat);
    chat.updated = Date.now();
    store.write(chat).catch(() => { state.stored = false; changed(); });
    changed();
}
const remember = (chat: Chat) => { try { sessionStorage.setItem("chat", chat.id); } catch { /* not remembered */ } };
export function open(chat: Chat) { state.chat = chat; remember(chat); changed(); }
export function fresh() { const chat = store.newChat(); chat.settings = { ...state.chat.settings, sampling: { ...state.chat.settings.sampling } }; open(chat); }
export function drop(chat: Chat) {
    stop(chat);
    state.chats = state.chats.filter((it) => it !== chat);
    store.erase(chat.id).catch(() => {});
    if (state.chat === chat) open(state.chats[0] ?? store.newChat()); else changed();
}
export async function begin() {
    whenKeyIsRefused(() => { state.needsKey = true; state.keyWrong = hasKey(); changed(); });
    try {
        const begun = state.chats, known = (await store.readAll()).filter((it) => begun.every((one) => one.id !== it.id));
        state.chats = [...begun, ...known.sort((a, b) => b.updated - a.updated)];
        for (const chat of known) for (const it of Object.values(chat.messages)) if (it.running) { it.running = false; it.note = t.interrupted; }
        let last: string | null = null;
        try { last = sessionStorage.getItem("chat"); } catch { /* none */ }
        const found = state.chats.find((it) => it.id === last);
        if (found && !Object.keys(state.chat.messages).length) state.chat = found;
    } catch { state.stored = false; }
    changed();
    setInterval(() => { if (!document.hidden) poll(); }, 1000);
    await poll();
}
let polling = false, looks = 0;
/** Between looks at the list of models. */
const LOOKS_PER_LIST = 5;
export async function poll() {
    if (polling || (state.needsKey && state.keyWrong)) return;
    polling = true;
    try {
        state.stats = await get("stats");
        state.offline = false; state.needsKey = false;
        for (const it of state.stats.models ?? []) take(it);
        await follow(state.stats.last_event);
        const asked = state.chat.settings.model;
        if (mayCompute() && (!state.props || state.props.asked !== asked)) {
            const query = asked && state.stats.models?.length > 1 ? "?model=" + encodeURIComponent(asked) : "";
            state.props = { asked, ...(await get("props" + query).catch(() => null)) };
        }
        if (looks++ % LOOKS_PER_LIST === 0) await refreshModels();
    } catch (error) { if (!(error instanceof Refused)) state.offline = true; }
    polling = false;
    changed();
}
/** Whether the key may ask the model something; a read-only key may not. */
export const mayCompute = () => state.stats?.may_compute !== false;
const ABOUT_GROUPS = ["group_lost", "group_formed", "group_failed"], NEWS_MS = 15_000, EVENTS_MOST = 500;
/** Fetches what has happened since the last look; what concerns running answers is noted with them. */
async function follow(last: number | undefined) {
    if (last === undefined || last === state.lastEvent) return;
    // A server that was started again counts from 1 again.
    const isFirst = state.lastEvent < 0, since = isFirst || last < state.lastEvent ? 0 : state.lastEvent;
    if (!since) state.events = [];
    const told = await get("events?since=" + since);
    state.lastEvent = told.last;
    state.events = [...state.events, ...told.events].slice(-EVENTS_MOST);
    if (isFirst) return;
    for (const it of told.events as Happening[]) {
        const text = ABOUT_GROUPS.includes(it.kind) && toReader(it);
        if (!text) continue;
        state.news = { text, isBad: it.kind === "group_failed", at: Date.now() };
        for (const [message, model] of answering) {
            if (model !== undefined && model !== it.model) continue;
            // That a machine is back says that it was lost.
            const before = (message.lost ?? []).filter((one) => one !== t.machineLost);
            message.lost = [...before, text];
        }
    }
}
/** What happened to a group, for the person who asks; nothing where a model was loaded as it should. */
function toReader(it: Happening): string {
    if (it.kind === "group_lost") return t.machineLost;
    if (it.kind === "group_failed") return it.text;
    const before = state.events.filter((one) => one.model === it.model && one.number < it.number && ABOUT_GROUPS.includes(one.kind));
    const formed = before.findLastIndex((one) => one.kind === "group_formed"), lost = before.slice(formed + 1).find((one) => one.kind === "group_lost");
    return lost ? t.machineBack(seconds(Date.parse(it.time) - Date.parse(lost.time))) : "";
}
const seconds = (ms: number) => (ms / 1000).toFixed(1) + " s";
/** What happened to a group just now; nothing once that is some time ago. */
export const news = () => state.news && Date.now() - state.news.at < NEWS_MS ? state.news : null;
/** The ranks of a model that are gone and not back yet. */
export function lostRanks(model: string): Set<number> {
    const last = state.events.findLast((it) => it.model === model && ABOUT_GROUPS.includes(it.kind));
    return new Set(last?.kind === "group_lost" && typeof last.fields?.rank === "number" ? [last.fields.rank] : []);
}
export const eventTime = (it: Happening) => { const at = new Date(it.time); return at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString(); };
async function refreshModels() {
    const list = (await get("v1/models")).data as any[];
    state.models = await Promise.all(list.slice(0, 32).map((it) => get("v1/models/" + it.id).catch(() => it)));
}
export async function manage(id: string, what: "load" | "unload") {
    state.busyModels[id] = what; delete state.modelErrors[id]; changed();
    try { await ask("v1/models/" + what, { model: id }); } catch (error) { state.modelErrors[id] = (error as Error).message; }
    delete state.busyModels[id];
    await refreshModels().catch(() => {});
    changed();
}
export const chars = (text: string) => text ? t.characters(text.length) : "";
/** An error, and what to do about it. */
export function explained(error: Error): string {
    if (error instanceof TypeError) return t.broken;
    const next = error instanceof Refused ? t.doNext[error.status] : undefined;
    return next ? `${error.message}. ${next}` : error.message;
}
/** What of the settings is not usable, in words; nothing if all is well. */
export function fault({ tools, schema }: store.Settings): string {
    for (const [what, text, isArray] of [[t.tools, tools, true], [t.schema, schema, false]] as const) {
        if (!text.trim()) continue;
        try { const value = JSON.parse(text); if (Array.isArray(value) !== isArray || typeof value !== "object" || !value) return t.mustBe(what, isArray ? t.anArray : t.anObject); }
        catch (error) { return t.notJson(what, (error as Error).message); }
    }
    return "";
}
export function request(chat: Chat): any {
    const { system, tools, schema, sampling, model } = chat.settings;
    const messages: any[] = system.trim() ? [{ role: "system", content: system }] : [];
    for (const it of store.path(chat)) {
        if (it.running || (it.role === "assistant" && !it.content && !it.calls?.length)) continue;
        const files = (it.files ?? []).map((file) => `${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n\n`).join("");
        messages.push({ role: it.role, content: files + it.content, ...(it.calls?.length ? { tool_calls: it.calls } : {}), ...(it.callId ? { tool_call_id: it.callId } : {}) });
    }
    return {
        messages, stream: true, stream_options: { include_usage: true }, ...sampling, ...(model ? { model } : {}),
        ...(tools.trim() ? { tools: JSON.parse(tools) } : {}),
        ...(schema.trim() ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } } : {}),
    };
}
/** Says something, after the leaf or in place of an earlier message of the user's. */
export function say(chat: Chat, content: string, files: Message["files"], parent: string | null = chat.leaf) {
    if (!chat.title) chat.title = content.trim().slice(0, 60) || files?.[0]?.name || t.untitled;
    store.add(chat, { parent, role: "user", content, files: files?.length ? files : undefined });
    answer(chat);
}
export function retry(chat: Chat, message: Message) { chat.leaf = message.parent; answer(chat); }
/** The result of a call; once all calls have one, the model goes on. */
export function giveResult(chat: Chat, call: string, content: string) {
    store.add(chat, { parent: chat.leaf, role: "tool", callId: call, content });
    keep(chat);
    const messages = store.path(chat), asked = messages.findLast((it) => it.calls?.length)!;
    const given = messages.slice(messages.indexOf(asked) + 1).map((it) => it.callId);
    if (asked.calls!.every((it) => given.includes(it.id))) answer(chat);
}
/** Answers that are being written, or were until a look ago, and the model that was asked. */
const answering = new Map<Message, string | undefined>();
const LOOK_MS = 2000, AGAIN_MS = 500, LOADING_MOST_MS = 600_000;
/** Asks for an answer; while the model is loading the question waits, until it is stopped. */
async function askWhenLoaded(body: any, signal: AbortSignal): Promise<Response> {
    for (const begun = performance.now(); ;) {
        try { return await ask("v1/chat/completions", body, signal); } catch (error) {
            if (!(error instanceof Refused) || error.status !== 503 || performance.now() - begun > LOADING_MOST_MS) throw error;
            state.stats = await get("stats").catch(() => state.stats);
            if (state.stats?.state !== "starting" && state.stats?.state !== "loading") throw error;
            changed();
            await new Promise((then) => setTimeout(then, AGAIN_MS));
            signal.throwIfAborted();
        }
    }
}
async function answer(chat: Chat) {
    if (running.has(chat.id)) return;
    const body = request(chat), control = new AbortController(), begun = performance.now();
    const message = store.add(chat, { parent: chat.leaf, role: "assistant", content: "", running: true });
    running.set(chat.id, control);
    answering.set(message, chat.settings.model);
    keep(chat);
    const saving = setInterval(() => keep(chat), 2000);
    let thoughtSince = 0;
    try {
        for await (const event of events(await askWhenLoaded(body, control.signal))) {
            if (event.error) throw new Error(event.error.message);
            if (event.usage) message.usage = event.usage;
            const { delta, finish_reason } = event.choices?.[0] ?? {};
            if (finish_reason === "length") message.note = t.lengthEnd;
            if (!delta) continue;
            if (delta.content || delta.reasoning_content || delta.tool_calls) message.firstMs ??= performance.now() - begun;
            if (delta.reasoning_content) { thoughtSince ||= performance.now(); message.reasoning = (message.reasoning ?? "") + delta.reasoning_content; }
            if (delta.content) message.content += delta.content;
            if (thoughtSince && !message.reasoningMs && (delta.content || delta.tool_calls)) message.reasoningMs = performance.now() - thoughtSince;
            for (const part of delta.tool_calls ?? []) {
                const call = (message.calls ??= [])[part.index] ??= { id: part.id, type: "function", function: { name: part.function.name, arguments: "" } };
                call.function.arguments += part.function.arguments ?? "";
            }
            message.ms = performance.now() - begun;
            changed();
        }
    } catch (error) {
        if ((error as Error).name === "AbortError") message.note = t.stopped;
        else message.error = explained(error as Error);
    }
    if (thoughtSince) message.reasoningMs ??= performance.now() - thoughtSince;
    message.ms = performance.now() - begun;
    message.running = false;
    clearInterval(saving);
    running.delete(chat.id);
    // What happened in its last moments is told by the next look.
    setTimeout(() => { answering.delete(message); keep(chat); }, LOOK_MS);
    keep(chat);
}
