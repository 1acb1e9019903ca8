// The cluster as it is now and as it was: nodes and links, figures, memory by use, and what happened.
import { size } from "./parts";
import { eventTime, lostRanks, useStore, type Sample } from "./state";
import { t } from "./strings";

function Spark({ samples, name, of, unit }: { samples: Sample[]; name: string; of: (it: Sample) => number; unit: string }) {
    const values = samples.map(of), most = Math.max(1e-9, ...values), span = Math.max(1, values.length - 1);
    const step = Math.max(1, Math.floor(values.length / 240));
    const points = values.flatMap((value, at) => at % step && at !== values.length - 1 ? [] : [`${(at / span * 240).toFixed(1)},${(34 - value / most * 30).toFixed(1)}`]);
    return <div class="spark"><span>{name}</span><b>{(values.at(-1) ?? 0).toFixed(1)}{unit}</b><svg viewBox="0 0 240 36" preserveAspectRatio="none" role="img" aria-label={`${name}: ${(values.at(-1) ?? 0).toFixed(1)}${unit}`}><polyline points={points.join(" ")} /></svg></div>;
}
function Map({ nodes, links, lost }: { nodes: any[]; links: any[]; lost: Set<number> }) {
    const place = (at: number) => nodes.length === 1 ? [160, 60] : [160 + 118 * Math.cos(2 * Math.PI * at / nodes.length + Math.PI), 84 + 56 * Math.sin(2 * Math.PI * at / nodes.length + Math.PI)];
    return <svg class="map" viewBox={`0 0 320 ${nodes.length === 1 ? 120 : 168}`} role="img" aria-label={`${t.mapOf}: ${nodes.map((it) => it.name + (lost.has(it.rank) ? ` (${t.lost})` : "")).join(", ")}`}>
        {links.map((link) => { const [a, b] = link.ranks.map((rank: number) => place(nodes.findIndex((it) => it.rank === rank))); if (!a || !b) return null; return <g><line class={link.transport} x1={a[0]} y1={a[1]} x2={b[0]} y2={b[1]} />{nodes.length < 5 && <text class="small" x={(a[0] + b[0]) / 2} y={(a[1] + b[1]) / 2 - 6}>{link.transport}{link.latency_us !== undefined && ` · ${Math.round(link.latency_us)} µs`}</text>}</g>; })}
        {nodes.map((node, at) => { const [x, y] = place(at); return <g class={lost.has(node.rank) ? "lost" : ""}><circle cx={x} cy={y} r="20" /><text x={x} y={y + 4}>{node.rank}</text><text class="small" x={x} y={y + 34}>{String(node.name).slice(0, 22)}</text></g>; })}</svg>;
}
const USES = [["weights_bytes", t.weights], ["cache_bytes", t.cache], ["working_bytes", t.working]] as const;
function Memory({ shares }: { shares: any[] }) {
    return <>{shares.map((it) => <div class="memory"><p class="hint"><b>{it.machine}</b> {size(it.total_bytes)}</p>
        <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">{USES.map(([use], at) => { const before = USES.slice(0, at).reduce((sum, [name]) => sum + it[name], 0); return <rect class={use} x={before / it.total_bytes * 100} width={it[use] / it.total_bytes * 100} height="6" />; })}</svg>
        <p class="hint legend">{USES.map(([use, name]) => <span><i class={use} />{name} {size(it[use])}</span>)}</p></div>)}</>;
}
function Events() {
    const { events } = useStore();
    if (!events.length) return <p class="hint">{t.noEvents}</p>;
    return <ol class="events">{events.slice(-50).reverse().map((it) => <li key={it.number} class={it.kind}><time dateTime={it.time}>{eventTime(it)}</time><b>{t.eventKinds[it.kind] ?? it.kind.replaceAll("_", " ")}</b><span>{it.text}</span></li>)}</ol>;
}
export function ClusterPanel() {
    const { stats: all, samples, chat, models } = useStore(), stats = all?.models?.find((it: any) => it.model === chat.settings.model) ?? all;
    if (!stats?.nodes) return <section class="panel"><p class="hint">{t.noStats}</p></section>;
    const { run, accepted } = stats.drafts ?? {}, prompts = stats.prompt_tokens, lost = lostRanks(stats.model);
    const share = (part: number, whole: number) => whole ? Math.round(part / whole * 100) + " %" : "–";
    const memory = models.find((it) => it.id === stats.model)?.memory ?? [];
    return <section class="panel">{stats.nodes.length > 0 && <Map nodes={stats.nodes} links={stats.links ?? []} lost={lost} />}
        <dl class="numbers">{[[t.rate, stats.tokens_per_second.toFixed(1)], [t.running, `${stats.requests.running} / ${stats.requests.most}`], [t.queued, stats.requests.waiting], [t.drafts, share(accepted, run)], [t.cacheHits, share(prompts?.cached, prompts?.all)], [t.context, stats.context]].map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
        <h3>{t.hour}</h3><Spark samples={samples} name={t.rate} of={(it) => it.rate} unit="" /><Spark samples={samples} name={t.queued} of={(it) => it.queue} unit="" /><Spark samples={samples} name={t.step} of={(it) => it.step} unit=" ms" />
        <h3>{t.nodes}</h3>{stats.nodes.map((node: any) => { const facts = [t.rank(node.rank)]; if (node.memory_bytes) facts.push(size(node.memory_bytes)); if (node.power_watts !== undefined) facts.push(node.power_watts.toFixed(0) + " W"); if (node.temperature_celsius !== undefined) facts.push(node.temperature_celsius.toFixed(0) + " °C");
            return <div class="card node"><b>{node.name}</b>{lost.has(node.rank) && <span class="state failed"> {t.lost}</span>}<p class="hint">{facts.join(" · ")}</p>{node.step_ms !== undefined && <><progress max={node.step_ms || 1} value={node.allreduce_ms ?? 0} aria-label={t.sum} /><p class="hint">{t.step} {node.step_ms.toFixed(1)} ms{node.allreduce_ms !== undefined && ` · ${t.sum} ${node.allreduce_ms.toFixed(2)} ms · ${t.rest} ${Math.max(0, node.step_ms - node.allreduce_ms).toFixed(1)} ms`}</p></>}</div>; })}
        {memory.length > 0 && <><h3>{t.memoryByUse}</h3><Memory shares={memory} /></>}
        <h3>{t.events}</h3><Events /></section>;
}
