// The page's frame: chats on the left, the conversation, and a panel on the right.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { setKey } from "./api";
import { ChatView } from "./chat";
import { warm } from "./lazy";
import { Button, Dialog, download, Icon, pick } from "./parts";
import { ClusterPanel } from "./cluster";
import { Playground } from "./playground";
import { ModelsPanel, SettingsPanel } from "./side";
import { begin, drop, fresh, isRunning, keep, mayCompute, open, poll, state, stop, useStore } from "./state";
import { parseChats, toMarkdown } from "./store";
import { t } from "./strings";

type Panel = "settings" | "models" | "cluster" | null;
const recall = (name: string) => { try { return localStorage.getItem(name); } catch { return null; } };
const remember = (name: string, value: string) => { try { localStorage.setItem(name, value); } catch { /* not remembered */ } };
function Chats({ onPick }: { onPick: () => void }) {
    const { chats, chat } = useStore(), [words, setWords] = useState(""), [fault, setFault] = useState("");
    const found = words.trim() ? chats.filter((it) => (it.title + " " + Object.values(it.messages).map((one) => one.content).join(" ")).toLowerCase().includes(words.trim().toLowerCase())) : chats;
    const take = async () => {
        setFault("");
        for (const file of await pick(true, ".json")) try { const read = parseChats(await file.text()); read.forEach(keep); if (read[0]) open(read[0]); } catch { setFault(t.importFailed); }
    };
    const stamp = () => new Date().toISOString().slice(0, 10);
    return <nav class="chats" aria-label={t.chats}><button type="button" class="new" onClick={() => { fresh(); onPick(); }}><Icon name="plus" />{t.newChat}</button>
        <input id="search" type="search" aria-label={t.search} placeholder={t.search} value={words} onInput={(event) => setWords(event.currentTarget.value)} />
        <ul>{found.map((it) => <li class={it === chat ? "here" : ""}><button type="button" aria-current={it === chat ? "true" : undefined} onClick={() => { open(it); onPick(); }}>{it.title || t.untitled}</button><Button icon="trash" label={`${t.remove} ${it.title}`} onClick={() => { if (confirm(t.confirmDelete)) drop(it); }} /></li>)}</ul>
        {words && !found.length && <p class="hint">{t.noChats}</p>}{fault && <p class="error" role="alert">{fault}</p>}
        <div class="tools"><button type="button" onClick={() => download(`chats-${stamp()}.json`, JSON.stringify({ format: "shardpack-chats", version: 1, chats }, null, 1), "application/json")}>{t.exportJson}</button><button type="button" onClick={() => download(`${(chat.title || "chat").replace(/[^\w -]+/g, "_")}.md`, toMarkdown(chat), "text/markdown")}>{t.exportMarkdown}</button><button type="button" onClick={take}>{t.importChats}</button></div></nav>;
}
function KeyDialog() {
    const [value, setValue] = useState(""), [kept, setKept] = useState(false), { keyWrong } = useStore();
    return <Dialog title={t.keyAsk} onClose={() => { state.needsKey = false; }}><form class="panel" onSubmit={(event) => { event.preventDefault(); setKey(value.trim(), kept); state.needsKey = false; state.keyWrong = false; poll(); }}>
        {keyWrong && <p class="error" role="alert">{t.keyWrong}</p>}<label>{t.key}<input type="password" autocomplete="off" value={value} onInput={(event) => setValue(event.currentTarget.value)} /></label><p class="hint">{t.keyHint}</p>
        <label class="pick"><input type="checkbox" checked={kept} onChange={(event) => setKept(event.currentTarget.checked)} />{t.keyKeep}</label><button class="main">{t.keyUse}</button></form></Dialog>;
}
function Page() {
    const { stats, offline, needsKey, chat, models } = useStore();
    const [view, setView] = useState<"chat" | "play">("chat"), [panel, setPanel] = useState<Panel>(null), [drawer, setDrawer] = useState(false), [help, setHelp] = useState(false), [theme, setTheme] = useState(recall("theme") ?? "");
    useEffect(() => { if (theme) { document.documentElement.dataset.theme = theme; remember("theme", theme); } }, [theme]);
    useEffect(() => {
        const press = (event: KeyboardEvent) => {
            const control = event.ctrlKey || event.metaKey, run: Record<string, () => void> = { k: () => { setDrawer(true); setTimeout(() => document.getElementById("search")?.focus()); }, ",": () => setPanel((it) => it === "settings" ? null : "settings"), "/": () => setHelp(true) };
            if (event.key === "Escape" && !document.querySelector("dialog[open]")) { if (isRunning(state.chat)) stop(state.chat); else { setPanel(null); setDrawer(false); } }
            else if (control && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); fresh(); }
            else if (control && !event.shiftKey && run[event.key]) { event.preventDefault(); run[event.key](); }
        };
        addEventListener("keydown", press); return () => removeEventListener("keydown", press);
    }, []);
    const now = offline ? "offline" : stats?.state ?? "", toggle = (name: Panel) => setPanel(panel === name ? null : name);
    const shownModel = chat.settings.model ?? models[0]?.id ?? stats?.model ?? t.product;
    // Keys without the scope infer see the cluster, and with the scope admin the models that they load.
    const watches = !mayCompute(), manages = stats?.may_manage === true;
    const dark = () => theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    return <div class={"page" + (watches ? " watching" : panel ? " has-panel" : "") + (drawer ? " has-drawer" : "")}>
        <header class="top">{!watches && <Button icon="menu" label={t.menu} kind="only-small" onClick={() => setDrawer(!drawer)} />}<button type="button" class="model-name" onClick={() => toggle("models")} aria-label={`${t.models}: ${shownModel}`}><b id="model">{shownModel}</b></button><span id="state" class={"state " + now}>{t.states[now] ?? now}</span><span class="grow" />
            <span class="rate" title={t.rate}>{stats ? t.rateNow(stats.tokens_per_second.toFixed(1)) : ""}</span>{watches ? <span class="state">{manages ? t.adminOnly : t.readOnly}</span> : <><Button icon="flask" label={view === "chat" ? t.playground : t.chatView} kind={view === "play" ? "on" : ""} onClick={() => setView(view === "chat" ? "play" : "chat")} /><Button icon="chart" label={t.cluster} kind={panel === "cluster" ? "on" : ""} onClick={() => toggle("cluster")} /><Button icon="gear" label={t.settings} kind={panel === "settings" ? "on" : ""} onClick={() => toggle("settings")} /><Button icon="keys" label={t.keys} kind="not-small" onClick={() => setHelp(true)} /></>}<Button icon="moon" label={t.theme} onClick={() => setTheme(dark() ? "light" : "dark")} /></header>
        {watches ? <main class="watch"><h1 class="hidden">{t.cluster}</h1>{manages && <><h2>{t.models}</h2><ModelsPanel /><h2>{t.cluster}</h2></>}<ClusterPanel /></main> : <><Chats onPick={() => { setDrawer(false); setView("chat"); }} />{drawer && <div class="shade" onClick={() => setDrawer(false)} />}{view === "chat" ? <ChatView /> : <Playground />}</>}
        {panel && !watches && <aside class="side" aria-label={t[panel]}><header><h2>{t[panel]}</h2><Button icon="close" label={t.close} onClick={() => setPanel(null)} /></header>{panel === "settings" ? <SettingsPanel /> : panel === "models" ? <ModelsPanel /> : <ClusterPanel />}</aside>}
        {help && <Dialog title={t.keys} onClose={() => setHelp(false)}><dl class="shortcuts">{t.shortcuts.map(([press, what]) => <div><dt><kbd>{press}</kbd></dt><dd>{what}</dd></div>)}</dl></Dialog>}{needsKey && <KeyDialog />}</div>;
}
// A task of its own, so that none is long.
setTimeout(() => {
    const app = document.getElementById("app")!;
    app.textContent = "";
    render(<Page />, app);
    begin().then(warm);
});
