// The panel beside the chat: settings, models, and the cluster.
import { useState } from "preact/hooks";
import { size } from "./parts";
import { changed, fault, keep, manage, useStore, type Sample } from "./state";
import { t } from "./strings";

const PRESETS: Record<keyof typeof t.presets, Record<string, number>> = { own: {}, precise: { temperature: 0.2, top_p: 0.9 }, balanced: { temperature: 0.7, top_p: 0.95 }, creative: { temperature: 1, top_p: 1, min_p: 0.05 } };
const FIELDS = [["temperature", t.temperature, "temperature"], ["top_p", t.topP, "top_p"], ["top_k", t.topK, "top_k"], ["min_p", t.minP, "min_p"], ["max_tokens", t.maxTokens, ""], ["seed", t.seed, ""]] as const;
export function SettingsPanel() {
    const { chat, props } = useStore(), { settings } = chat, defaults = props?.default_generation_settings?.params ?? {};
    const change = (work: () => void) => { work(); if (Object.keys(chat.messages).length) keep(chat); else changed(); };
    const chosen = Object.entries(PRESETS).find(([, values]) => JSON.stringify(Object.entries(values).sort()) === JSON.stringify(Object.entries(settings.sampling).filter(([name]) => name !== "seed" && name !== "max_tokens").sort()))?.[0] ?? "";
    const wrong = fault(settings);
    return <section class="panel"><label>{t.system}<textarea rows={4} placeholder={t.systemHint} value={settings.system} onInput={(event) => change(() => { settings.system = event.currentTarget.value; })} /></label>
        <h3>{t.sampling}</h3>
        <label>{t.preset}<select value={chosen} onChange={(event) => change(() => { const { seed, max_tokens } = settings.sampling; settings.sampling = { ...PRESETS[event.currentTarget.value as "own"], ...(seed === undefined ? {} : { seed }), ...(max_tokens === undefined ? {} : { max_tokens }) }; })}>{!chosen && <option value="" disabled>–</option>}{Object.entries(t.presets).map(([id, name]) => <option value={id}>{name}</option>)}</select></label>
        <div class="fields">{FIELDS.map(([id, name, own]) => <label>{name}<input inputMode="decimal" placeholder={own ? String(defaults[own] ?? "") : id === "seed" ? t.random : t.off} value={settings.sampling[id] ?? ""}
            onChange={(event) => change(() => { const text = event.currentTarget.value.trim(), value = Number(text); if (text && Number.isFinite(value)) settings.sampling[id] = value; else { delete settings.sampling[id]; event.currentTarget.value = ""; } })} /></label>)}</div>
        {props?.sampling_from && <p class="hint">{t.defaultsOf(props.sampling_from)}</p>}
        <label>{t.tools}<textarea class="mono" rows={6} spellcheck={false} placeholder={'[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]'} value={settings.tools} onInput={(event) => change(() => { settings.tools = event.currentTarget.value; })} /></label><p class="hint">{t.toolsHint}</p>
        <label>{t.schema}<textarea class="mono" rows={4} spellcheck={false} placeholder={'{"type": "object", "properties": {"answer": {"type": "string"}}}'} value={settings.schema} onInput={(event) => change(() => { settings.schema = event.currentTarget.value; })} /></label><p class="hint">{t.schemaHint}</p>
        {wrong && <p class="error" role="alert">{wrong}</p>}</section>;
}
export function ModelsPanel() {
    const { models, chat, busyModels, modelErrors, stats } = useStore(), many = (stats?.models?.length ?? 0) > 1;
    return <section class="panel">{models.map((model) => {
        const busy = busyModels[model.id], memory = (model.memory ?? []).reduce((sum: number, it: any) => sum + it.total_bytes, 0);
        return <div class="card model"><label class="pick">{many && <input type="radio" name="model" checked={(chat.settings.model ?? models[0].id) === model.id} onChange={() => { chat.settings.model = model.id; changed(); }} />}<b>{model.id}</b><span class={"state " + model.state}>{model.state}</span></label>
            <p class="hint">{model.max_model_len} {t.tokens} {t.context}{memory > 0 && ` · ${size(memory)} ${t.memory}`}{model.source?.bits ? ` · ${model.source.bits} bit` : ""}</p>
            {model.state_detail && <p class="hint">{model.state_detail}</p>}{model.swap && <p class="hint">{model.swap}</p>}{modelErrors[model.id] && <p class="error" role="alert">{modelErrors[model.id]}</p>}
            {"pinned" in model && (busy ? <p class="hint">{busy === "load" ? t.loading : t.unloading}</p> : model.state === "loaded" ? <button type="button" onClick={() => manage(model.id, "unload")}>{t.unload}</button> : ["unloaded", "failed"].includes(model.state) && <button type="button" onClick={() => manage(model.id, "load")}>{t.load}</button>)}</div>;
    })}</section>;
}
function Spark({ samples, name, of, unit }: { samples: Sample[]; name: string; of: (it: Sample) => number; unit: string }) {
    const values = samples.map(of), most = Math.max(1e-9, ...values), span = Math.max(1, values.length - 1);
    const step = Math.max(1, Math.floor(values.length / 240));
    const points = values.flatMap((value, at) => at % step && at !== values.length - 1 ? [] : [`${(at / span * 240).toFixed(1)},${(34 - value / most * 30).toFixed(1)}`]);
    return <div class="spark"><span>{name}</span><b>{(values.at(-1) ?? 0).toFixed(1)}{unit}</b><svg viewBox="0 0 240 36" preserveAspectRatio="none" role="img" aria-label={`${name}: ${(values.at(-1) ?? 0).toFixed(1)}${unit}`}><polyline points={points.join(" ")} /></svg></div>;
}
function Map({ nodes, links }: { nodes: any[]; links: any[] }) {
    const place = (at: number) => nodes.length === 1 ? [160, 60] : [160 + 118 * Math.cos(2 * Math.PI * at / nodes.length + Math.PI), 84 + 56 * Math.sin(2 * Math.PI * at / nodes.length + Math.PI)];
    return <svg class="map" viewBox={`0 0 320 ${nodes.length === 1 ? 120 : 168}`} role="img" aria-label={`${t.mapOf}: ${nodes.map((it) => it.name).join(", ")}`}>
        {links.map((link) => { const [a, b] = link.ranks.map((rank: number) => place(nodes.findIndex((it) => it.rank === rank))); if (!a || !b) return null; return <g><line class={link.transport} x1={a[0]} y1={a[1]} x2={b[0]} y2={b[1]} />{nodes.length < 5 && <text class="small" x={(a[0] + b[0]) / 2} y={(a[1] + b[1]) / 2 - 6}>{link.transport}{link.latency_us !== undefined && ` · ${Math.round(link.latency_us)} µs`}</text>}</g>; })}
        {nodes.map((node, at) => { const [x, y] = place(at); return <g><circle cx={x} cy={y} r="20" /><text x={x} y={y + 4}>{node.rank}</text><text class="small" x={x} y={y + 34}>{String(node.name).slice(0, 22)}</text></g>; })}</svg>;
}
export function ClusterPanel() {
    const { stats: all, samples, chat, chats } = useStore(), stats = all?.models?.find((it: any) => it.model === chat.settings.model) ?? all;
    const [hits] = useState(() => () => { let cached = 0, prompt = 0; for (const it of [chat, ...chats].flatMap((one) => Object.values(one.messages))) { cached += it.usage?.prompt_tokens_details?.cached_tokens ?? 0; prompt += it.usage?.prompt_tokens ?? 0; } return prompt ? Math.round(cached / prompt * 100) + " %" : "–"; });
    if (!stats) return <section class="panel"><p class="hint">{t.noStats}</p></section>;
    const { run, accepted } = stats.drafts ?? {};
    return <section class="panel"><Map nodes={stats.nodes} links={stats.links ?? []} />
        <dl class="numbers">{[[t.rate, stats.tokens_per_second.toFixed(1)], [t.running, `${stats.requests.running} / ${stats.requests.most}`], [t.queued, stats.requests.waiting], [t.drafts, run ? Math.round(accepted / run * 100) + " %" : "–"], [t.cacheHits, hits()], [t.context, stats.context]].map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
        <h3>{t.hour}</h3><Spark samples={samples} name={t.rate} of={(it) => it.rate} unit="" /><Spark samples={samples} name={t.queued} of={(it) => it.queue} unit="" /><Spark samples={samples} name={t.step} of={(it) => it.step} unit=" ms" />
        <h3>{t.nodes}</h3>{stats.nodes.map((node: any) => { const facts = [t.rank(node.rank)]; if (node.memory_bytes) facts.push(size(node.memory_bytes)); if (node.power_watts !== undefined) facts.push(node.power_watts.toFixed(0) + " W"); if (node.temperature_celsius !== undefined) facts.push(node.temperature_celsius.toFixed(0) + " °C");
            return <div class="card node"><b>{node.name}</b><p class="hint">{facts.join(" · ")}</p>{node.step_ms !== undefined && <><progress max={node.step_ms || 1} value={node.allreduce_ms ?? 0} aria-label={t.sum} /><p class="hint">{t.step} {node.step_ms.toFixed(1)} ms{node.allreduce_ms !== undefined && ` · ${t.sum} ${node.allreduce_ms.toFixed(2)} ms · ${t.rest} ${Math.max(0, node.step_ms - node.allreduce_ms).toFixed(1)} ms`}</p></>}</div>; })}</section>;
}
