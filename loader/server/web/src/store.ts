// Conversations: trees of messages, kept in IndexedDB.
export type Call = { id: string; type: "function"; function: { name: string; arguments: string } };
export type Usage = { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } };
export type Message = {
    id: string; parent: string | null; role: "user" | "assistant" | "tool"; content: string; reasoning?: string; reasoningMs?: number;
    calls?: Call[]; callId?: string; files?: { name: string; text: string }[]; usage?: Usage; ms?: number; firstMs?: number; error?: string; note?: string; lost?: string[]; running?: boolean;
};
export type Settings = { system: string; tools: string; schema: string; sampling: Partial<Record<"temperature" | "top_p" | "top_k" | "min_p" | "max_tokens" | "seed", number>>; model?: string };
export type Chat = { id: string; title: string; updated: number; messages: Record<string, Message>; leaf: string | null; settings: Settings };

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
export const newChat = (): Chat => ({ id: newId(), title: "", updated: Date.now(), messages: {}, leaf: null, settings: { system: "", tools: "", schema: "", sampling: {} } });

/** The messages from the root to the leaf. */
export function path(chat: Chat): Message[] {
    const found: Message[] = [];
    for (let id = chat.leaf; id && chat.messages[id]; id = chat.messages[id].parent) found.push(chat.messages[id]);
    return found.reverse();
}
export const children = (chat: Chat, parent: string | null) => Object.values(chat.messages).filter((it) => it.parent === parent);
export function add(chat: Chat, message: Omit<Message, "id">): Message {
    const made = { ...message, id: newId() };
    chat.messages[made.id] = made;
    chat.leaf = made.id;
    return made;
}
/** Follows the newest branch from a message down. */
export function descend(chat: Chat, id: string) {
    for (let next = children(chat, id).at(-1); next; next = children(chat, id).at(-1)) id = next.id;
    chat.leaf = id;
}
/** Removes a message and all that follows it. */
export function prune(chat: Chat, id: string) {
    const { parent } = chat.messages[id];
    const drop = (it: string) => { for (const child of children(chat, it)) drop(child.id); delete chat.messages[it]; };
    drop(id);
    const sibling = children(chat, parent).at(-1);
    if (sibling) descend(chat, sibling.id); else chat.leaf = parent;
}

let opened: Promise<IDBDatabase> | null = null;
const database = () => opened ??= new Promise((done, failed) => {
    const request = indexedDB.open("shardpack", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
});
async function run<T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
    const transaction = (await database()).transaction("chats", mode);
    const request = work(transaction.objectStore("chats"));
    return new Promise((done, failed) => {
        transaction.oncomplete = () => done(request.result);
        transaction.onerror = transaction.onabort = () => failed(transaction.error);
    });
}
export const readAll = () => run<Chat[]>("readonly", (store) => store.getAll());
export const write = (chat: Chat) => run("readwrite", (store) => store.put(JSON.parse(JSON.stringify(chat))));
export const erase = (id: string) => run("readwrite", (store) => store.delete(id));

function usageOf(from: any): Usage | undefined {
    const [prompt_tokens, completion_tokens, cached_tokens] = [from?.prompt_tokens, from?.completion_tokens, from?.prompt_tokens_details?.cached_tokens].map(Number);
    return prompt_tokens >= 0 && completion_tokens >= 0 ? { prompt_tokens, completion_tokens, prompt_tokens_details: { cached_tokens: cached_tokens || 0 } } : undefined;
}
/** Chats of an exported file. What is not a chat is refused: this comes from outside. */
export function parseChats(text: string): Chat[] {
    const file = JSON.parse(text);
    if (file?.format !== "shardpack-chats" || !Array.isArray(file.chats)) throw new Error();
    const string = (it: unknown) => typeof it === "string" ? it : "";
    return file.chats.map((from: any) => {
        const chat = { ...newChat(), title: string(from.title).slice(0, 200), updated: Number(from.updated) || Date.now() };
        const { system, tools, schema, sampling } = from.settings ?? {};
        chat.settings = { system: string(system), tools: string(tools), schema: string(schema), sampling: {} };
        for (const [name, value] of Object.entries(sampling ?? {})) if (typeof value === "number") (chat.settings.sampling as any)[name] = value;
        for (const it of Object.values<any>(from.messages ?? {})) {
            if (typeof it?.id !== "string" || !["user", "assistant", "tool"].includes(it.role)) throw new Error();
            const calls = Array.isArray(it.calls) ? it.calls.map((call: any) => ({ id: string(call?.id), type: "function" as const, function: { name: string(call?.function?.name), arguments: string(call?.function?.arguments) } })) : undefined;
            const files = Array.isArray(it.files) ? it.files.map((one: any) => ({ name: string(one?.name), text: string(one?.text) })) : undefined;
            chat.messages[it.id] = { id: it.id, parent: typeof it.parent === "string" ? it.parent : null, role: it.role, content: string(it.content), calls, files,
                reasoning: string(it.reasoning) || undefined, reasoningMs: Number(it.reasoningMs) || undefined, callId: string(it.callId) || undefined, ms: Number(it.ms) || undefined, firstMs: Number(it.firstMs) || undefined, note: string(it.note) || undefined, usage: usageOf(it.usage) };
        }
        // A parent must exist and no message may be its own ancestor.
        for (const it of Object.values(chat.messages)) {
            const seen = new Set<string>();
            for (let at: Message | undefined = it; at; at = at.parent ? chat.messages[at.parent] : undefined) {
                if (seen.has(at.id) || (at.parent && !chat.messages[at.parent])) throw new Error();
                seen.add(at.id);
            }
        }
        chat.leaf = typeof from.leaf === "string" && chat.messages[from.leaf] ? from.leaf : Object.keys(chat.messages).at(-1) ?? null;
        return chat;
    });
}
export const toMarkdown = (chat: Chat) => `# ${chat.title}\n\n` + path(chat).map((it) => {
    const calls = (it.calls ?? []).map((call) => "```json\n" + call.function.name + "(" + call.function.arguments + ")\n```").join("\n\n");
    const files = (it.files ?? []).map((file) => `${file.name}:\n\`\`\`\n${file.text}\n\`\`\``).join("\n\n");
    return `## ${it.role}\n\n${[files, it.content, calls].filter(Boolean).join("\n\n")}\n`;
}).join("\n");
