// One conversation: its messages and where the next is written.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Markdown } from "./lazy";
import { Button, Copy, Icon, pick, seconds } from "./parts";
import { changed, fault, giveResult, isRunning, keep, news, retry, say, state, stop, useStore } from "./state";
import { children, descend, path, prune, type Call, type Chat, type Message } from "./store";
import { t } from "./strings";

const FILE_BYTES_MAX = 4 << 20;
function Branches({ chat, message }: { chat: Chat; message: Message }) {
    const all = children(chat, message.parent), at = all.indexOf(message);
    if (all.length < 2) return null;
    const go = (to: number) => { descend(chat, all[to].id); keep(chat); };
    return <span class="branches"><Button icon="left" label={t.previous} onClick={() => go(at - 1)} disabled={at === 0} /><span>{at + 1} / {all.length}</span><Button icon="right" label={t.next} onClick={() => go(at + 1)} disabled={at === all.length - 1} /></span>;
}
function CallCard({ chat, call, result, ready }: { chat: Chat; call: Call; result?: Message; ready: boolean }) {
    const [text, setText] = useState("");
    let shown = call.function.arguments;
    try { shown = JSON.stringify(JSON.parse(shown), null, 2); } catch { /* still growing */ }
    return <div class="card call"><div class="bar"><span><Icon name="tool" /> {t.callOf}: <b>{call.function.name}</b></span><Copy text={() => shown} /></div><pre tabIndex={0} aria-label={t.callOf}>{shown}</pre>
        {result ? <div class="result"><small>{t.toolResult}</small><pre tabIndex={0} aria-label={t.toolResult}>{result.content}</pre></div>
            : ready && <form class="give" onSubmit={(event) => { event.preventDefault(); giveResult(chat, call.id, text); }}>
                <input aria-label={t.result} placeholder={t.toolResult} value={text} onInput={(event) => setText(event.currentTarget.value)} /><button class="main">{t.giveBack}</button></form>}</div>;
}
function facts(message: Message) {
    const { usage, ms, firstMs } = message;
    if (!ms) return "";
    const found = [seconds(ms)], cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) {
        found.unshift(t.count(usage.prompt_tokens, usage.completion_tokens));
        const generating = (ms - (firstMs ?? 0)) / 1000;
        if (generating > 0.01) found.push(t.speed((usage.completion_tokens / generating).toFixed(1)));
        if (cached) found.push(t.cached(cached));
    }
    if (firstMs) found.push(t.firstAfter(seconds(firstMs)));
    return found.join(" · ");
}
function Turn({ chat, message, last, results }: { chat: Chat; message: Message; last: boolean; results: Message[] }) {
    const [draft, setDraft] = useState<string | null>(null);
    const live = !!message.running, busy = isRunning(chat);
    if (message.role === "user") return <article class="turn user" aria-label={t.you}>
        {draft === null ? <div class="bubble">{message.files?.map((file) => <span class="chip"><Icon name="clip" />{file.name}</span>)}{message.content}</div>
            : <form class="editing" onSubmit={(event) => { event.preventDefault(); setDraft(null); say(chat, draft, message.files, message.parent); }}>
                <textarea aria-label={t.edit} value={draft} rows={3} ref={(it) => { if (it && document.activeElement !== it) it.focus(); }} onInput={(event) => setDraft(event.currentTarget.value)} onKeyDown={(event) => event.key === "Escape" && setDraft(null)} />
                <div><button type="button" onClick={() => setDraft(null)}>{t.cancel}</button><button class="main">{t.save}</button></div></form>}
        <footer><Branches chat={chat} message={message} /><Copy text={() => message.content} /><Button icon="edit" label={t.edit} onClick={() => setDraft(message.content)} disabled={busy} /><Button icon="trash" label={t.remove} onClick={() => { prune(chat, message.id); keep(chat); }} disabled={busy} /></footer></article>;
    return <article class="turn assistant" aria-label={t.assistant} aria-busy={live}>
        {message.reasoning && <details class="thinking" open={live && !message.reasoningMs}><summary>{message.reasoningMs ? t.thought(seconds(message.reasoningMs)) : t.thinking}</summary><Markdown source={message.reasoning} live={live} /></details>}
        {live && !message.content && !message.reasoning && !message.calls && <p class="wait">{state.stats?.state === "recovering" ? t.recovering : ["starting", "loading"].includes(state.stats?.state) ? t.loadingModel : t.waiting}</p>}
        <div class="answer"><Markdown source={message.content} live={live} /></div>
        {message.calls?.map((call) => <CallCard key={call.id} chat={chat} call={call} result={results.find((it) => it.callId === call.id)} ready={!live && !message.error && !busy} />)}
        {message.error && <p class="error" role="alert">{message.error}</p>}{message.note && <p class="note">{message.note}</p>}{message.lost && <ul class="lost" aria-label={t.lostDuring}>{message.lost.map((text) => <li>{text}</li>)}</ul>}
        {!live && <footer><Branches chat={chat} message={message} /><Copy text={() => message.content} /><Button icon="retry" label={t.retry} onClick={() => retry(chat, message)} disabled={busy} /><Button icon="trash" label={t.remove} onClick={() => { prune(chat, message.id); keep(chat); }} disabled={busy} /><small class={"facts" + (last ? " last" : "")}>{facts(message)}</small></footer>}</article>;
}
function Composer({ chat }: { chat: Chat }) {
    const [text, setText] = useState(""), [files, setFiles] = useState<{ name: string; text: string }[]>([]), [problem, setProblem] = useState("");
    const area = useRef<HTMLTextAreaElement>(null), busy = isRunning(chat);
    useEffect(() => { if (innerWidth > 700) area.current!.focus(); }, [chat.id]);
    useLayoutEffect(() => { const it = area.current!; it.style.height = "auto"; if (text) it.style.height = Math.min(it.scrollHeight, innerHeight / 3) + "px"; }, [text]);
    const send = () => {
        if (busy) return stop(chat);
        const wrong = fault(chat.settings);
        setProblem(wrong);
        if (wrong || (!text.trim() && !files.length)) return;
        say(chat, text.trim(), files); setText(""); setFiles([]);
    };
    const attach = async (chosen: File[]) => {
        setProblem("");
        for (const file of chosen) {
            const content = file.size > FILE_BYTES_MAX ? null : await file.text();
            if (content === null || content.includes("\0")) setProblem(t.notText(file.name));
            else setFiles((before) => [...before, { name: file.name, text: content }]);
        }
    };
    return <form class="composer" onSubmit={(event) => { event.preventDefault(); send(); }} onDragOver={(event) => event.preventDefault()} onDrop={(event) => { event.preventDefault(); attach([...event.dataTransfer!.files]); }}>
        {problem && <p class="error" role="alert">{problem}</p>}
        <div class="box">{files.length > 0 && <div class="chips">{files.map((file, at) => <button type="button" class="chip" aria-label={`${t.remove} ${file.name}`} onClick={() => setFiles(files.filter((_, it) => it !== at))}>{file.name}<Icon name="close" /></button>)}</div>}
            <textarea ref={area} rows={1} aria-label={t.message} placeholder={t.placeholder} value={text} onInput={(event) => setText(event.currentTarget.value)}
                onKeyDown={(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!busy) send(); } }} />
            <div class="row"><Button icon="clip" label={t.attach} onClick={async () => attach(await pick(true))} /><button class="main round" aria-label={busy ? t.stop : t.send} title={busy ? t.stop : t.send}><Icon name={busy ? "stop" : "send"} /></button></div></div></form>;
}
export function ChatView() {
    const { chat, stats, offline, stored } = useStore(), log = useRef<HTMLDivElement>(null), follows = useRef(true);
    const messages = path(chat), lately = news(), shown = messages.filter((it) => it.role !== "tool");
    useLayoutEffect(() => { if (shown.length && follows.current && log.current) log.current.scrollTop = 1e9; });
    useEffect(() => { follows.current = true; changed(); }, [chat.id, messages.length]);
    return <main class="chat"><div class="log" ref={log} tabIndex={0} role="log" aria-label={t.chats} aria-live="off" onScroll={() => { const it = log.current!; follows.current = it.scrollHeight - it.scrollTop - it.clientHeight < 80; }}>
        {shown.length > 0 && <h1 class="hidden">{chat.title}</h1>}{shown.length === 0 && <div class="empty"><h1>{t.empty}</h1><p>{t.emptyHint}</p></div>}
        {shown.map((it, at) => <Turn key={it.id} chat={chat} message={it} last={at === shown.length - 1} results={messages.slice(messages.indexOf(it))} />)}</div>
        {offline ? <p class="banner bad" role="alert">{t.offline}</p> : stats?.state === "recovering" ? <p class="banner" role="status">{t.recovering} {stats.reason}</p> : lately ? <p class={"banner" + (lately.isBad ? " bad" : "")} role="status">{lately.text}</p> : stats?.reason ? <p class="banner bad" role="status">{t.states[stats.state] ?? stats.state}: {stats.reason}</p> : !stored && <p class="banner" role="status">{t.storage}</p>}
        <Composer chat={chat} /></main>;
}
