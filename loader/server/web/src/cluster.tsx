// The cluster as it is now and as it was: nodes and links, figures, memory by use, and what happened.
import { samplesOf, traffic, type Sample } from "./figures";
import { size } from "./parts";
import { eventTime, lostRanks, useStore } from "./state";
import { t } from "./strings";

function Spark({ samples, name, of, unit }: { samples: Sample[]; name: string; of: (it: Sample) => number; unit: string }) {
    const values = samples.map(of), most = Math.max(1e-9, ...values), span = Math.max(1, values.length - 1);
    const step = Math.max(1, Math.floor(values.length / 240));
    const points = values.flatMap((value, at) => at % step && at !== values.length - 1 ? [] : [`${(at / span * 240).toFixed(1)},${(34 - value / most * 30).toFixed(1)}`]);
    return <div class="spark"><span>{name}</span><b>{(values.at(-1) ?? 0).toFixed(1)}{unit}</b><svg viewBox="0 0 240 36" preserveAspectRatio="none" role="img" aria-label={`${name}: ${(values.at(-1) ?? 0).toFixed(1)}${unit}`}><polyline points={points.join(" ")} /></svg></div>;
}
const micros = (us: number) => us.toFixed(us < 10 ? 1 : 0) + " µs";
function Map({ nodes, links, lost }: { nodes: any[]; links: any[]; lost: Set<number> }) {
    const place = (at: number) => nodes.length === 1 ? [160, 60] : [160 + 118 * Math.cos(2 * Math.PI * at / nodes.length + Math.PI), 84 + 56 * Math.sin(2 * Math.PI * at / nodes.length + Math.PI)];
    return <svg class="map" viewBox={`0 0 320 ${nodes.length === 1 ? 120 : 168}`} role="img" aria-label={`${t.mapOf}: ${nodes.map((it) => it.name + (lost.has(it.rank) ? ` (${t.lost})` : "")).join(", ")}`}>
        {links.map((link) => { const [a, b] = link.ranks.map((rank: number) => place(nodes.findIndex((it) => it.rank === rank))); if (!a || !b) return null; return <g><line class={link.transport} x1={a[0]} y1={a[1]} x2={b[0]} y2={b[1]} />{nodes.length < 5 && <text class="small" x={(a[0] + b[0]) / 2} y={(a[1] + b[1]) / 2 - 6}>{link.transport}{link.latency_us !== undefined && ` · ${micros(link.latency_us)}`}</text>}</g>; })}
        {nodes.map((node, at) => { const [x, y] = place(at); return <g class={lost.has(node.rank) ? "lost" : ""}><circle cx={x} cy={y} r="20" /><text x={x} y={y + 4}>{node.rank}</text><text class="small" x={x} y={y + 34}>{String(node.name).slice(0, 22)}</text></g>; })}</svg>;
}
const USES = [["weights_bytes", t.weights], ["cache_bytes", t.cache], ["working_bytes", t.working]] as const;
function Memory({ shares }: { shares: any[] }) {
    return <>{shares.map((it) => <div class="memory"><p class="hint"><b>{it.machine}</b> {size(it.total_bytes)}</p>
        <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">{USES.map(([use], at) => { const before = USES.slice(0, at).reduce((sum, [name]) => sum + it[name], 0); return <rect class={use} x={before / it.total_bytes * 100} width={it[use] / it.total_bytes * 100} height="6" />; })}</svg>
        <p class="hint legend">{USES.map(([use, name]) => <span><i class={use} />{name} {size(it[use])}</span>)}</p></div>)}</>;
}
/** What a rank says of itself and its machine; a sensor that the machine lacks is no zero. */
function NodeCard({ node, model, isLost, isAlone }: { node: any; model: string; isLost: boolean; isAlone: boolean }) {
    const hasSpoken = node.memory_bytes !== undefined || node.step_ms !== undefined;
    const told = (value: number | undefined, shown: (it: number) => string) => value !== undefined ? shown(value) : hasSpoken ? t.notMeasured : t.notYet;
    const facts = [[t.memory, told(node.memory_bytes, size)], [t.temperatureOf, told(node.temperature_celsius, (it) => it.toFixed(0) + " °C")], [t.power, told(node.power_watts, (it) => it.toFixed(0) + " W")],
        ...(isAlone ? [] : [[t.network, told(traffic(model, node.rank), (it) => t.aSecond(size(it)))]])];
    return <div class="card node"><b>{node.name}</b>{node.name !== t.rank(node.rank) && <span class="hint"> {t.rank(node.rank)}</span>}{isLost && <span class="state failed"> {t.lost}</span>}
        <dl class="facts">{facts.map(([name, value]) => <div><dt>{name}</dt><dd class={value === t.notMeasured || value === t.notYet ? "none" : ""}>{value}</dd></div>)}</dl>
        {node.step_ms !== undefined && <><progress max={node.step_ms || 1} value={node.allreduce_ms ?? 0} aria-label={t.sum} /><p class="hint">{t.step} {node.step_ms.toFixed(1)} ms{node.allreduce_ms !== undefined && ` · ${t.sum} ${node.allreduce_ms.toFixed(2)} ms · ${t.rest} ${Math.max(0, node.step_ms - node.allreduce_ms).toFixed(1)} ms`}</p></>}</div>;
}
function Links({ links, nodes }: { links: any[]; nodes: any[] }) {
    const name = (rank: number) => nodes.find((it) => it.rank === rank)?.name ?? t.rank(rank);
    return <ul class="links">{links.map((link) => <li key={link.ranks.join()}><b>{link.ranks.map(name).join(" – ")}</b><span>{[link.transport, link.latency_us !== undefined ? micros(link.latency_us) : t.notMeasured, link.bytes_per_second !== undefined ? t.aSecond(size(link.bytes_per_second)) : t.notMeasured].join(" · ")}</span>{link.declined && <small>{t.declined(link.declined)}</small>}</li>)}</ul>;
}
function Events() {
    const { events } = useStore();
    if (!events.length) return <p class="hint">{t.noEvents}</p>;
    return <ol class="events">{events.slice(-50).reverse().map((it) => <li key={it.number} class={it.kind}><time dateTime={it.time}>{eventTime(it)}</time><b>{t.eventKinds[it.kind] ?? it.kind.replaceAll("_", " ")}</b><span>{it.text}</span></li>)}</ol>;
}
export function ClusterPanel() {
    const { stats: all, chat, models } = useStore(), stats = all?.models?.find((it: any) => it.model === chat.settings.model) ?? all;
    if (!stats?.nodes) return <section class="panel"><p class="hint">{t.noStats}</p></section>;
    const { run, accepted } = stats.drafts ?? {}, prompts = stats.prompt_tokens, lost = lostRanks(stats.model);
    const share = (part: number, whole: number) => whole ? Math.round(part / whole * 100) + " %" : "–";
    const memory = models.find((it) => it.id === stats.model)?.memory ?? [], samples = samplesOf(stats.model), links = stats.links ?? [];
    const numbers = [[t.rate, stats.tokens_per_second.toFixed(1)], [t.running, `${stats.requests.running} / ${stats.requests.most}`], [t.queued, stats.requests.waiting], [t.drafts, run ? share(accepted, run) : t.noDrafts], [t.cacheHits, share(prompts?.cached, prompts?.all)], [t.context, stats.context]];
    return <section class="panel">{stats.nodes.length > 0 && <Map nodes={stats.nodes} links={links} lost={lost} />}
        <dl class="numbers">{numbers.map(([name, value]) => <div><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
        <h3>{t.hour}</h3><Spark samples={samples} name={t.rate} of={(it) => it.rate} unit="" /><Spark samples={samples} name={t.queued} of={(it) => it.queue} unit="" /><Spark samples={samples} name={t.step} of={(it) => it.step} unit=" ms" />{run > 0 && <Spark samples={samples} name={t.drafts} of={(it) => it.acceptance} unit=" %" />}
        <h3>{t.nodes}</h3>{stats.nodes.map((node: any) => <NodeCard key={node.rank} node={node} model={stats.model} isLost={lost.has(node.rank)} isAlone={stats.nodes.length < 2} />)}
        {links.length > 0 && <><h3>{t.linksOf}</h3><Links links={links} nodes={stats.nodes} /></>}
        {memory.length > 0 && <><h3>{t.memoryByUse}</h3><Memory shares={memory} /></>}
        <h3>{t.events}</h3><Events /></section>;
}
