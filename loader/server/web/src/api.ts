// The server's addresses, the API key, and streams of events.
import { t } from "./strings";
export class Refused extends Error { constructor(message: string, readonly status: number) { super(message); } }
const read = () => { try { return sessionStorage.getItem("key") ?? localStorage.getItem("key") ?? ""; } catch { return ""; } };
let key = read();
export function setKey(value: string, keep: boolean) {
    key = value;
    try { sessionStorage.setItem("key", value); if (keep) localStorage.setItem("key", value); else localStorage.removeItem("key"); } catch { /* kept in memory */ }
}
export const hasKey = () => key !== "";
let onRefused = () => {};
export const whenKeyIsRefused = (then: () => void) => { onRefused = then; };

export async function ask(address: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = { "content-type": "application/json" };
    if (key) headers.authorization = "Bearer " + key;
    const response = await fetch(address, { method: body ? "POST" : "GET", headers, body: body ? JSON.stringify(body) : undefined, signal });
    if (response.ok) return response;
    if (response.status === 401) onRefused();
    const told = await response.json().catch(() => null);
    throw new Refused(told?.error?.message ?? `${address}: status ${response.status}`, response.status);
}
export const get = async (address: string) => (await ask(address, undefined, AbortSignal.timeout(10_000))).json();

/** Between two frames: time for a stream, and events of it, since what they bring is to be rendered too. */
const BUSY_MS = 4, EVENTS_MOST = 300, HIDDEN_MS = 100;
/** Until a frame was drawn; a page that nobody sees draws none. */
const drawn = () => new Promise<void>((done) => { setTimeout(done, HIDDEN_MS); requestAnimationFrame(() => setTimeout(done)); });
/** The events of a stream; a stream that ends without its last line is broken. */
export async function* events(response: Response): AsyncGenerator<any> {
    const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", since = performance.now(), count = 0;
    for (;;) {
        const { value, done } = await reader.read();
        if (done) throw new Error(t.broken);
        const frames = (rest + value).split("\n\n");
        rest = frames.pop()!;
        for (const frame of frames) {
            if (!frame.startsWith("data: ")) continue;
            if (frame === "data: [DONE]") return;
            // A stream that is faster than the page leaves time to draw it.
            if (++count > EVENTS_MOST || performance.now() - since > BUSY_MS) { await drawn(); count = 0; since = performance.now(); }
            yield JSON.parse(frame.slice(6));
        }
    }
}
