// One prompt for one model, or for several models and settings side by side: the text that the template makes
// of it, and how likely each token was.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, events } from "./api";
import { Button, Copy, seconds } from "./parts";
import { chars, explained, useStore } from "./state";
import { t } from "./strings";

type Token = { text: string; logprob: number; top: { text: string; logprob: number }[] };
/** Settings of one answer, as they were typed; an empty one is that of all answers, and else the model's. */
type Sampling = { temperature: string; top_p: string; seed: string };
type Side = { model: string; own: Sampling; tokens: Token[]; text: string; prompt: string; promptTokens: number | null; busy: boolean; error: string; ms: number; firstMs: number };
type Asked = { prompt: string; system: string; raw: boolean; sampling: Sampling; most: string };
const TOP = 5, SIDES_MOST = 4;
const FIELDS = [["temperature", t.temperature], ["top_p", t.topP], ["seed", t.seed]] as const;
const unset = (): Sampling => ({ temperature: "", top_p: "", seed: "" });
const side = (model = "", own = unset()): Side => ({ model, own, tokens: [], text: "", prompt: "", promptTokens: null, busy: false, error: "", ms: 0, firstMs: 0 });
const likely = (logprob: number) => Math.exp(logprob);
const percent = (logprob: number) => { const it = likely(logprob) * 100; return (it < 10 ? it.toFixed(1) : Math.round(it)) + " %"; };
/** What cannot be seen is shown as a sign. */
const seen = (text: string) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
const levels = [0.9, 0.6, 0.3, 0.1];
const level = (logprob: number) => { const found = levels.findIndex((it) => likely(logprob) >= it); return "p" + (found < 0 ? levels.length : found); };

const messagesOf = ({ system, prompt }: Asked) => [...(system.trim() ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
/** The body of a request, without what is about its answer. */
const input = (asked: Asked, model: string) => ({ ...(asked.raw ? { prompt: asked.prompt } : { messages: messagesOf(asked) }), ...(model ? { model } : {}) });
/** The settings of one answer as a request names them. */
function numbers(asked: Asked, own: Sampling) {
    const found: Record<string, number> = { max_tokens: Number(asked.most) || 256 };
    for (const [name, title] of FIELDS) {
        const text = own[name].trim() || asked.sampling[name].trim();
        if (text && !Number.isFinite(Number(text))) throw new Error(t.notNumber(title, text));
        if (text) found[name] = Number(text);
    }
    return found;
}
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
    Object.assign(it, { ...side(it.model, it.own), busy: true });
    drawn();
    try {
        const body = input(asked, it.model), settings = numbers(asked, it.own);
        const tokenized = ask("tokenize", body, signal).then((reply) => reply.json());
        it.prompt = asked.raw ? asked.prompt : (await (await ask("apply-template", body, signal)).json()).prompt;
        it.promptTokens = (await tokenized).count;
        drawn();
        const wanted = asked.raw ? { logprobs: TOP } : { logprobs: true, top_logprobs: TOP };
        const reply = await ask(asked.raw ? "v1/completions" : "v1/chat/completions", { ...body, ...wanted, ...settings, stream: true }, signal);
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
function Fields({ of, hint, set }: { of: Sampling; hint: string; set: (name: keyof Sampling, value: string) => void }) {
    return <>{FIELDS.map(([name, title]) => <label key={name}>{title}<input inputMode="decimal" value={of[name]} placeholder={hint || (name === "seed" ? t.random : t.modelsOwn)} onInput={(event) => set(name, event.currentTarget.value)} /></label>)}</>;
}
/** One answer; beside others it has settings of its own, and the prompt is unfolded where it is another than before. */
function SideView({ it, at, models, choose, set, leave, only, isFirst }: { it: Side; at: number; models: any[]; choose: (model: string) => void; set: (name: keyof Sampling, value: string) => void; leave: () => void; only: boolean; isFirst: boolean }) {
    const rate = it.tokens.length / Math.max(1e-3, (it.ms - it.firstMs) / 1000);
    return <section class="card pane" aria-label={only ? it.model : `${it.model}, ${t.variantOf(at + 1)}`} aria-busy={it.busy}><div class="bar">{only && models.length < 2 ? <b>{it.model}</b> : <label><span aria-hidden="true">{t.model}</span><select aria-label={t.model} value={it.model} disabled={it.busy} onChange={(event) => choose(event.currentTarget.value)}>{models.map((one) => <option value={one.id}>{one.id}</option>)}</select></label>}<span>{it.text && <Copy text={() => it.text} />}{at > 0 && <Button icon="close" label={`${t.close}: ${t.variantOf(at + 1)}`} onClick={leave} />}</span></div>
        {!only && <div class="fields own" role="group" aria-label={t.variantOf(at + 1)}><Fields of={it.own} hint={t.asAbove} set={set} /></div>}
        {it.prompt && <details open={isFirst}><summary>{t.rendered}{it.promptTokens !== null && ` · ${t.countOf(it.promptTokens)}`}</summary><pre class="raw" tabIndex={0} aria-label={t.rendered}>{it.prompt}</pre></details>}
        {it.error && <p class="error" role="alert">{it.error}</p>}
        {it.tokens.length > 0 && <Tokens tokens={it.tokens} name={it.model} />}
        {it.busy && !it.tokens.length && <p class="wait">{t.waiting}</p>}
        {!it.busy && it.ms > 0 && <p class="hint">{[t.countOf(it.tokens.length), seconds(it.ms), t.speed(rate.toFixed(1)), t.firstAfter(seconds(it.firstMs))].join(" · ")}</p>}</section>;
}
export function Playground() {
    const { models } = useStore(), [, draw] = useState(0), control = useRef<AbortController | null>(null);
    const [asked, setAsked] = useState<Asked>({ prompt: "", system: "", raw: false, sampling: unset(), most: "256" });
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
    const add = (it: Side) => { sides.push(it); drawn(); };
    const leave = (gone: Side[]) => { control.current?.abort(); for (const it of gone) sides.splice(sides.indexOf(it), 1); drawn(); };
    return <main class="play"><form class="ask" onSubmit={(event) => { event.preventDefault(); start(); }}><h1>{t.playground}</h1><p class="hint">{t.playHint}</p>
        <div class="choice" role="radiogroup" aria-label={t.promptAs}>{[false, true].map((raw) => <label class="pick"><input type="radio" name="raw" checked={asked.raw === raw} onChange={() => set({ raw })} />{raw ? t.rawPrompt : t.asMessage}</label>)}</div>
        {!asked.raw && <label>{t.system}<textarea rows={1} placeholder={t.systemHint} value={asked.system} onInput={(event) => set({ system: event.currentTarget.value })} /></label>}
        <label>{t.prompt}<textarea rows={4} class={asked.raw ? "mono" : ""} value={asked.prompt} onInput={(event) => set({ prompt: event.currentTarget.value })} onKeyDown={(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start(); } }} /></label>
        <div class="fields"><Fields of={asked.sampling} hint="" set={(name, value) => set({ sampling: { ...asked.sampling, [name]: value } })} /><label>{t.maxTokens}<input inputMode="numeric" value={asked.most} onChange={(event) => set({ most: event.currentTarget.value })} /></label></div>
        <div class="row"><button class="main">{busy ? t.stop : t.run}</button><span class="hint">{chars(asked.prompt)}</span><span class="grow" />{sides.length < SIDES_MOST && <>{models.length > 1 && <button type="button" onClick={() => add(side())}>{t.compare}</button>}<button type="button" onClick={() => add(side(sides.at(-1)!.model, { ...sides.at(-1)!.own }))}>{t.variant}</button></>}{sides.length > 1 && <button type="button" onClick={() => leave(sides.slice(1))}>{t.noCompare}</button>}</div></form>
        <div class={"panes" + (sides.length > 1 ? " two" : "")}>{sides.map((it, at) => <SideView key={at} it={it} at={at} models={models} only={sides.length < 2} isFirst={sides.findIndex((one) => one.model === it.model) === at} choose={(model) => { Object.assign(it, side(model, it.own)); drawn(); }} set={(name, value) => { it.own[name] = value; drawn(); }} leave={() => leave([it])} />)}</div></main>;
}
