// One prompt, one or two models: the text that the template makes of it, and how likely each token was.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, events } from "./api";
import { Copy, seconds } from "./parts";
import { chars, explained, useStore } from "./state";
import { t } from "./strings";

type Token = { text: string; logprob: number; top: { text: string; logprob: number }[] };
type Side = { model: string; tokens: Token[]; text: string; prompt: string; promptTokens: number | null; busy: boolean; error: string; ms: number; firstMs: number };
type Asked = { prompt: string; system: string; raw: boolean; temperature: string; most: string };
const TOP = 5;
const side = (model = ""): Side => ({ model, tokens: [], text: "", prompt: "", promptTokens: null, busy: false, error: "", ms: 0, firstMs: 0 });
const likely = (logprob: number) => Math.exp(logprob);
const percent = (logprob: number) => { const it = likely(logprob) * 100; return (it < 10 ? it.toFixed(1) : Math.round(it)) + " %"; };
/** What cannot be seen is shown as a sign. */
const seen = (text: string) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
const levels = [0.9, 0.6, 0.3, 0.1];
const level = (logprob: number) => { const found = levels.findIndex((it) => likely(logprob) >= it); return "p" + (found < 0 ? levels.length : found); };

const messagesOf = ({ system, prompt }: Asked) => [...(system.trim() ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
/** The body of a request, without what is about its answer. */
const input = (asked: Asked, model: string) => ({ ...(asked.raw ? { prompt: asked.prompt } : { messages: messagesOf(asked) }), ...(model ? { model } : {}) });
function tokensOf(choice: any): Token[] {
    const { logprobs } = choice ?? {};
    if (!logprobs) return [];
    if (logprobs.content) return logprobs.content.map((it: any) => ({ text: it.token, logprob: it.logprob ?? 0, top: it.top_logprobs.map((one: any) => ({ text: one.token, logprob: one.logprob })) }));
    const { tokens, token_logprobs, top_logprobs } = logprobs;
    return tokens.map((text: string, at: number) => ({ text, logprob: token_logprobs[at] ?? 0, top: Object.entries<number>(top_logprobs?.[at] ?? {}).map(([text, logprob]) => ({ text, logprob })) }));
}
/** Shows the text of the prompt, then the answer as it comes. */
async function run(asked: Asked, it: Side, signal: AbortSignal, drawn: () => void) {
    const begun = performance.now();
    Object.assign(it, { ...side(it.model), busy: true });
    drawn();
    try {
        const body = input(asked, it.model);
        const tokenized = ask("tokenize", body, signal).then((reply) => reply.json());
        it.prompt = asked.raw ? asked.prompt : (await (await ask("apply-template", body, signal)).json()).prompt;
        it.promptTokens = (await tokenized).count;
        drawn();
        const wanted = asked.raw ? { logprobs: TOP } : { logprobs: true, top_logprobs: TOP };
        const numbers = { ...(asked.temperature.trim() ? { temperature: Number(asked.temperature) } : {}), max_tokens: Number(asked.most) || 256 };
        const reply = await ask(asked.raw ? "v1/completions" : "v1/chat/completions", { ...body, ...wanted, ...numbers, stream: true }, signal);
        for await (const event of events(reply)) {
            if (event.error) throw new Error(event.error.message);
            const choice = event.choices?.[0];
            it.tokens.push(...tokensOf(choice));
            it.text += choice?.text ?? choice?.delta?.content ?? "";
            if (it.text) it.firstMs ||= performance.now() - begun;
            it.ms = performance.now() - begun;
            drawn();
        }
    } catch (error) { if ((error as Error).name !== "AbortError") it.error = explained(error as Error); }
    it.busy = false;
    drawn();
}
function Tokens({ tokens, name }: { tokens: Token[]; name: string }) {
    const [at, setAt] = useState(-1), shown = tokens[at];
    const move = (event: KeyboardEvent) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) { event.preventDefault(); setAt(Math.min(tokens.length - 1, Math.max(0, at + step))); }
    };
    const point = (event: Event) => { const found = (event.target as HTMLElement).dataset.at; if (found !== undefined) setAt(Number(found)); };
    return <><div class="tokens" tabIndex={0} role="group" aria-label={t.tokensOf(name)} onKeyDown={move} onMouseOver={point} onClick={point}>
        {tokens.map((it, index) => <span key={index} data-at={index} class={level(it.logprob) + (index === at ? " at" : "")} title={percent(it.logprob)}>{seen(it.text)}</span>)}</div>
        <div class="odds" aria-live="polite">{shown ? <table><caption>{t.tokenOdds(JSON.stringify(shown.text), percent(shown.logprob))}</caption><tbody>{shown.top.map((one) => <tr class={one.text === shown.text ? "chosen" : ""}><td class="mono">{JSON.stringify(one.text)}</td><td><progress max={1} value={likely(one.logprob)} aria-label={percent(one.logprob)} /></td><td>{percent(one.logprob)}</td></tr>)}</tbody></table> : <p class="hint">{t.tokenHint}</p>}</div></>;
}
function SideView({ it, models, choose, only }: { it: Side; models: any[]; choose: (model: string) => void; only: boolean }) {
    const rate = it.tokens.length / Math.max(1e-3, (it.ms - it.firstMs) / 1000);
    return <section class="card pane" aria-label={it.model} aria-busy={it.busy}><div class="bar">{only && models.length < 2 ? <b>{it.model}</b> : <label><span aria-hidden="true">{t.model}</span><select aria-label={t.model} value={it.model} disabled={it.busy} onChange={(event) => choose(event.currentTarget.value)}>{models.map((one) => <option value={one.id}>{one.id}</option>)}</select></label>}{it.text && <Copy text={() => it.text} />}</div>
        {it.prompt && <details open><summary>{t.rendered}{it.promptTokens !== null && ` · ${t.countOf(it.promptTokens)}`}</summary><pre class="raw" tabIndex={0} aria-label={t.rendered}>{it.prompt}</pre></details>}
        {it.error && <p class="error" role="alert">{it.error}</p>}
        {it.tokens.length > 0 && <Tokens tokens={it.tokens} name={it.model} />}
        {it.busy && !it.tokens.length && <p class="wait">{t.waiting}</p>}
        {!it.busy && it.ms > 0 && <p class="hint">{[t.countOf(it.tokens.length), seconds(it.ms), t.speed(rate.toFixed(1)), t.firstAfter(seconds(it.firstMs))].join(" · ")}</p>}</section>;
}
export function Playground() {
    const { models } = useStore(), [, draw] = useState(0), control = useRef<AbortController | null>(null);
    const [asked, setAsked] = useState<Asked>({ prompt: "", system: "", raw: false, temperature: "", most: "256" });
    const sides = useRef<Side[]>([side()]).current, drawn = () => draw((n) => n + 1);
    useEffect(() => () => control.current?.abort(), []);
    for (const [at, it] of sides.entries()) it.model ||= (models[at] ?? models[0])?.id ?? "";
    const busy = sides.some((it) => it.busy), set = (change: Partial<Asked>) => setAsked({ ...asked, ...change });
    const start = () => {
        if (busy) return control.current?.abort();
        if (!asked.prompt) return;
        control.current = new AbortController();
        for (const it of sides) run(asked, it, control.current.signal, drawn);
    };
    return <main class="play"><form class="ask" onSubmit={(event) => { event.preventDefault(); start(); }}><h1>{t.playground}</h1><p class="hint">{t.playHint}</p>
        <div class="choice" role="radiogroup" aria-label={t.promptAs}>{[false, true].map((raw) => <label class="pick"><input type="radio" name="raw" checked={asked.raw === raw} onChange={() => set({ raw })} />{raw ? t.rawPrompt : t.asMessage}</label>)}</div>
        {!asked.raw && <label>{t.system}<textarea rows={1} placeholder={t.systemHint} value={asked.system} onInput={(event) => set({ system: event.currentTarget.value })} /></label>}
        <label>{t.prompt}<textarea rows={4} class={asked.raw ? "mono" : ""} value={asked.prompt} onInput={(event) => set({ prompt: event.currentTarget.value })} onKeyDown={(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); } }} /></label>
        <div class="fields"><label>{t.temperature}<input inputMode="decimal" value={asked.temperature} placeholder={t.modelsOwn} onChange={(event) => set({ temperature: event.currentTarget.value })} /></label><label>{t.maxTokens}<input inputMode="numeric" value={asked.most} onChange={(event) => set({ most: event.currentTarget.value })} /></label></div>
        <div class="row"><button class="main">{busy ? t.stop : t.run}</button><span class="hint">{chars(asked.prompt)}</span><span class="grow" />{sides.length < 2 ? <button type="button" onClick={() => { sides.push(side()); drawn(); }}>{t.compare}</button> : <button type="button" onClick={() => { control.current?.abort(); sides.pop(); drawn(); }}>{t.noCompare}</button>}</div></form>
        <div class={"panes" + (sides.length > 1 ? " two" : "")}>{sides.map((it, at) => <SideView key={at} it={it} models={models} only={sides.length < 2} choose={(model) => { Object.assign(it, side(model)); drawn(); }} />)}</div></main>;
}
